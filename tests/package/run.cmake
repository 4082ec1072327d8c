# Installs Halftone, moves what was installed, and builds and runs the outside project against it.
#
#   cmake -DSOURCE=... -DBUILD=... -DWORK=... -DSHARED=... [-DMAKE=ON] -P run.cmake
#         [-- configure arguments...]
#
# BUILD is a build of Halftone as a shared library or a static one. With MAKE it is made first: the
# library alone, for the CPU. The arguments go to every project that is configured here.
cmake_minimum_required(VERSION 3.25)
set(arguments)
foreach(i RANGE ${CMAKE_ARGC})
  if(after)
    list(APPEND arguments "${CMAKE_ARGV${i}}")
  elseif("${CMAKE_ARGV${i}}" STREQUAL --)
    set(after ON)
  endif()
endforeach()
list(REMOVE_ITEM arguments "")

function(run)
  execute_process(COMMAND ${ARGV} COMMAND_ECHO STDOUT COMMAND_ERROR_IS_FATAL ANY)
endfunction()

if(MAKE)
  run(${CMAKE_COMMAND} -S ${SOURCE} -B ${BUILD} ${arguments} -DBUILD_SHARED_LIBS=${SHARED}
      -DHALFTONE_CUDA=OFF -DHALFTONE_TESTS=OFF -DHALFTONE_EXAMPLES=OFF -DHALFTONE_BENCHMARKS=OFF)
  run(${CMAKE_COMMAND} --build ${BUILD} --parallel 2)
endif()

file(REMOVE_RECURSE ${WORK})
run(${CMAKE_COMMAND} --install ${BUILD} --prefix ${WORK}/first)
file(RENAME ${WORK}/first ${WORK}/moved)
file(GLOB_RECURSE files ${WORK}/moved/*.cmake ${WORK}/moved/*.h)
foreach(file ${files})
  file(READ ${file} text)
  foreach(folder ${SOURCE} ${BUILD} ${WORK})
    string(FIND "${text}" ${folder} place)
    if(NOT place EQUAL -1)
      message(FATAL_ERROR "${file} names ${folder}, so it cannot be moved")
    endif()
  endforeach()
endforeach()

run(${CMAKE_COMMAND} -S ${SOURCE}/tests/package -B ${WORK}/outside ${arguments}
    -DCMAKE_PREFIX_PATH=${WORK}/moved -DBUILD_SHARED_LIBS=${SHARED})
run(${CMAKE_COMMAND} --build ${WORK}/outside)
run(${WORK}/outside/program)

# Where the operators are compiled for several levels of x86-64, the loader takes the library of one that runs here.
file(GLOB levels ${WORK}/moved/lib*/glibc-hwcaps/*)
if(levels)
  execute_process(COMMAND /lib64/ld-linux-x86-64.so.2 --help OUTPUT_VARIABLE known COMMAND_ERROR_IS_FATAL ANY)
  execute_process(COMMAND ldd ${WORK}/outside/program OUTPUT_VARIABLE found COMMAND_ERROR_IS_FATAL ANY)
  foreach(level ${levels})
    get_filename_component(name ${level} NAME)
    if(known MATCHES "${name} [(]supported" AND NOT found MATCHES "glibc-hwcaps/x86-64-v[0-9]/libhalftone")
      message(FATAL_ERROR "the loader does not take ${level}:\n${found}")
    endif()
  endforeach()
endif()
