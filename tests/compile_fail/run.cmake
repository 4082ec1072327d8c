# Compiles one file of this folder and holds what the compiler says against its `// expect:` lines: each must be in the
# errors. A file without any must compile without a warning.
#
#   cmake -DCOMPILER=... -DINCLUDE=... -DFILE=... -P run.cmake
cmake_minimum_required(VERSION 3.25)
execute_process(
  COMMAND ${COMPILER} -std=c++20 -fsyntax-only -Wall -Wextra -Wpedantic -Wshadow -Werror -I${INCLUDE} ${FILE}
  RESULT_VARIABLE result ERROR_VARIABLE said OUTPUT_VARIABLE said)
file(STRINGS ${FILE} expected REGEX "^// expect: ")
if(NOT expected AND result)
  message(FATAL_ERROR "this must compile, but the compiler says\n${said}")
elseif(expected AND NOT result)
  message(FATAL_ERROR "this must not compile, but does")
endif()
foreach(line ${expected})
  string(REGEX REPLACE "^// expect: " "" text "${line}")
  string(FIND "${said}" "${text}" place)
  if(place EQUAL -1)
    message(FATAL_ERROR "the errors do not say: ${text}\n${said}")
  endif()
endforeach()
