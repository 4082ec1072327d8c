# Writes OUT, which tells the commit of SOURCE, where that has changed.
execute_process(COMMAND git describe --always --abbrev=7 "--dirty= with changes" --exclude=*
                WORKING_DIRECTORY ${SOURCE} OUTPUT_VARIABLE commit OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
if(NOT commit)
  set(commit unknown)
endif()
set(text "#include \"halftone/benchmarks/bench/commit.h\"\n\nconst char* const benchmarks::commit = \"${commit}\";\n")
set(old)
if(EXISTS ${OUT})
  file(READ ${OUT} old)
endif()
if(NOT old STREQUAL text)
  file(WRITE ${OUT} "${text}")
endif()
