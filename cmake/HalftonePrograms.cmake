# Tests, examples and benchmarks: each .cpp is a program. A .cu of the same name is part of it. Programs
# named cuda_* exist only where CUDA is on, those named *_cupti where its profiling interface is, too.

# halftone_programs(folder kind [libraries...]): lists the targets in HALFTONE_PROGRAMS.
function(halftone_programs folder kind)
  file(GLOB files CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/${folder}/*.cpp)
  file(GLOB kernels CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/${folder}/*.cu)
  set(programs)
  foreach(file ${files})
    get_filename_component(stem ${file} NAME_WE)
    string(REGEX REPLACE "^[0-9]+_" "" name ${stem})
    if(stem MATCHES "^(main|run)$" OR (stem MATCHES "^cuda_" AND NOT HALFTONE_HAS_CUDA)
       OR (stem MATCHES "_cupti$" AND NOT TARGET CUDA::cupti))
      continue()
    endif()
    add_executable(${kind}_${name} ${file})
    set_target_properties(${kind}_${name} PROPERTIES
      OUTPUT_NAME ${name} RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/${folder})
    set(kernel ${PROJECT_SOURCE_DIR}/${folder}/${stem}.cu)
    if(HALFTONE_HAS_CUDA AND kernel IN_LIST kernels)
      target_sources(${kind}_${name} PRIVATE ${kernel})
    endif()
    halftone_compile(${kind}_${name})
    target_link_libraries(${kind}_${name} PRIVATE Halftone::halftone ${ARGN})
    if(stem MATCHES "_cupti$")
      target_link_libraries(${kind}_${name} PRIVATE CUDA::cupti)
    endif()
    list(APPEND programs ${kind}_${name})
  endforeach()
  set(HALFTONE_PROGRAMS ${programs} PARENT_SCOPE)
endfunction()

if(HALFTONE_TESTS)
  enable_testing()
  halftone_require(Catch2 2.13 catch2)
  add_library(test_main OBJECT ${PROJECT_SOURCE_DIR}/tests/main.cpp)
  halftone_compile(test_main)
  target_link_libraries(test_main PUBLIC Halftone::halftone Catch2::Catch2)
  target_compile_definitions(test_main INTERFACE HALFTONE_SOURCE_DIR="${PROJECT_SOURCE_DIR}")
  halftone_programs(tests test test_main)
  foreach(program ${HALFTONE_PROGRAMS})
    # Tests take longer to compile than to run.
    target_compile_options(${program} PRIVATE $<$<AND:$<COMPILE_LANGUAGE:CXX>,$<CONFIG:Release>>:-O1>)
    string(REGEX REPLACE "^test_" "" name ${program})
    add_test(NAME ${name} COMMAND ${program})
    set_tests_properties(${name} PROPERTIES SKIP_RETURN_CODE 77 TIMEOUT 900 FIXTURES_SETUP counts
                         ENVIRONMENT HALFTONE_COUNTS=${PROJECT_BINARY_DIR}/tests/counts)
    # A test with a line `// mpirun: 2 4` is run by so many processes, too.
    get_target_property(file ${program} SOURCES)
    list(GET file 0 file)
    file(STRINGS ${file} line REGEX "^// mpirun:" LIMIT_COUNT 1)
    string(REGEX MATCHALL "[0-9]+" counts "${line}")
    foreach(count ${counts})
      if(HALFTONE_HAS_MPI AND MPIEXEC_EXECUTABLE)
        add_test(NAME ${name}_${count} COMMAND ${MPIEXEC_EXECUTABLE} ${MPIEXEC_NUMPROC_FLAG} ${count} $<TARGET_FILE:${program}>)
        set_tests_properties(${name}_${count} PROPERTIES SKIP_RETURN_CODE 77 TIMEOUT 900 ENVIRONMENT
          "OMPI_ALLOW_RUN_AS_ROOT=1;OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1;OMPI_MCA_rmaps_base_oversubscribe=1;HALFTONE_NUM_THREADS=1")
      endif()
    endforeach()
  endforeach()
  # What they counted may grow, not shrink.
  add_test(NAME scoreboard COMMAND ${PROJECT_SOURCE_DIR}/scripts/scoreboard
           --build ${PROJECT_BINARY_DIR} --counted --check)
  set_tests_properties(scoreboard PROPERTIES FIXTURES_REQUIRED counts)

  # Spellings that the compiler must refuse, each with its sentence.
  file(GLOB files CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/tests/compile_fail/*.cpp)
  foreach(file ${files})
    get_filename_component(stem ${file} NAME_WE)
    add_test(NAME compile_fail_${stem} COMMAND ${CMAKE_COMMAND}
      -DCOMPILER=${CMAKE_CXX_COMPILER} -DINCLUDE=${PROJECT_BINARY_DIR}/include -DFILE=${file}
      -P ${PROJECT_SOURCE_DIR}/tests/compile_fail/run.cmake)
    set_tests_properties(compile_fail_${stem} PROPERTIES LABELS compile_fail)
  endforeach()
endif()

# Fuzz targets of the readers: preset `fuzz`, which compiles the library for them, too.
if(HALFTONE_FUZZ)
  file(GLOB files CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/tests/fuzz/*.cpp)
  foreach(file ${files})
    get_filename_component(stem ${file} NAME_WE)
    add_executable(fuzz_${stem} ${file})
    set_target_properties(fuzz_${stem} PROPERTIES
      OUTPUT_NAME ${stem} RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/tests/fuzz)
    halftone_compile(fuzz_${stem})
    target_link_libraries(fuzz_${stem} PRIVATE Halftone::halftone)
    target_link_options(fuzz_${stem} PRIVATE -fsanitize=fuzzer)
  endforeach()
endif()

# The installed tree, as this build makes it and as a build of the other kind would.
if(HALFTONE_TESTS AND HALFTONE_INSTALL)
  set(arguments -G ${CMAKE_GENERATOR} -DCMAKE_CXX_COMPILER=${CMAKE_CXX_COMPILER}
                -DCMAKE_BUILD_TYPE=$<CONFIG>)
  set(kinds static shared)
  foreach(shared 0 1)
    list(GET kinds ${shared} kind)
    set(build ${PROJECT_BINARY_DIR})
    set(make OFF)
    if((shared AND NOT BUILD_SHARED_LIBS) OR (NOT shared AND BUILD_SHARED_LIBS))
      set(build ${PROJECT_BINARY_DIR}/package/${kind})
      set(make ON)
    endif()
    add_test(NAME package_${kind} COMMAND ${CMAKE_COMMAND}
      -DSOURCE=${PROJECT_SOURCE_DIR} -DBUILD=${build} -DSHARED=${shared} -DMAKE=${make}
      -DWORK=${PROJECT_BINARY_DIR}/package/${kind}_installed
      -P ${PROJECT_SOURCE_DIR}/tests/package/run.cmake -- ${arguments})
    set_tests_properties(package_${kind} PROPERTIES TIMEOUT 1800 LABELS package)
  endforeach()
endif()

if(HALFTONE_EXAMPLES OR HALFTONE_BENCHMARKS)
  halftone_require(CLI11 2 libcli11-dev)
endif()
if(HALFTONE_EXAMPLES)
  add_library(example_run OBJECT ${PROJECT_SOURCE_DIR}/examples/run.cpp)  # CLI11 is compiled once
  halftone_compile(example_run)
  target_link_libraries(example_run PUBLIC Halftone::halftone PRIVATE CLI11::CLI11)
  halftone_programs(examples example example_run)
  # An example with a line `// ctest: arguments` is run with them; @data@ is the data that we ship.
  set(data ${PROJECT_SOURCE_DIR}/data)
  foreach(program ${HALFTONE_PROGRAMS})
    get_target_property(file ${program} SOURCES)
    list(GET file 0 file)
    file(STRINGS ${file} line REGEX "^// ctest:" LIMIT_COUNT 1)
    if(HALFTONE_TESTS AND line)
      string(REGEX REPLACE "^// ctest:" "" line ${line})
      string(CONFIGURE "${line}" line @ONLY)
      separate_arguments(arguments UNIX_COMMAND "${line}")
      add_test(NAME ${program} COMMAND ${program} ${arguments}
               WORKING_DIRECTORY ${PROJECT_BINARY_DIR}/examples)
      set_tests_properties(${program} PROPERTIES SKIP_RETURN_CODE 77 TIMEOUT 900)
      set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${file})
    endif()
  endforeach()
endif()
if(HALFTONE_BENCHMARKS)
  halftone_programs(benchmarks benchmark CLI11::CLI11)

  # halftone-bench is for users: it is installed, holds its script, and names its commit.
  set(own ${PROJECT_BINARY_DIR}/generated/benchmarks)
  set(script ${PROJECT_SOURCE_DIR}/benchmarks/peers/peers.py)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${script})
  file(READ ${script} text)
  file(CONFIGURE OUTPUT ${own}/script.cpp @ONLY CONTENT
"#include \"halftone/benchmarks/bench/script.h\"\n
const char* const benchmarks::peers_script = R\"python(@text@)python\";\n")
  add_custom_target(halftone_commit BYPRODUCTS ${own}/commit.cpp
    COMMAND ${CMAKE_COMMAND} -DSOURCE=${PROJECT_SOURCE_DIR} -DOUT=${own}/commit.cpp
            -P ${PROJECT_SOURCE_DIR}/cmake/commit.cmake)
  file(GLOB files CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/benchmarks/bench/*.cpp)
  add_executable(halftone-bench ${files} ${own}/script.cpp ${own}/commit.cpp)
  add_dependencies(halftone-bench halftone_commit)
  halftone_compile(halftone-bench)
  target_link_libraries(halftone-bench PRIVATE Halftone::halftone CLI11::CLI11 ${CMAKE_DL_LIBS})
  file(RELATIVE_PATH library /${CMAKE_INSTALL_BINDIR} /${CMAKE_INSTALL_LIBDIR})
  set_target_properties(halftone-bench PROPERTIES INSTALL_RPATH $ORIGIN/${library}
    RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/benchmarks)
  if(HALFTONE_INSTALL)
    install(TARGETS halftone-bench OPTIONAL)
  endif()
  if(HALFTONE_TESTS)
    set(small --device cpu --mlp 16,8,4 --batch 4 --rounds 1 --first-steps 2 --out bench)
    add_test(NAME bench COMMAND halftone-bench ${small})
    add_test(NAME bench_refuses COMMAND halftone-bench ${small} --captured-only)
    set_tests_properties(bench bench_refuses PROPERTIES TIMEOUT 300 WORKING_DIRECTORY ${PROJECT_BINARY_DIR}/benchmarks)
    set_tests_properties(bench PROPERTIES PASS_REGULAR_EXPRESSION "halftone +bf16 +eager.*bench.jsonl has these figures")
    set_tests_properties(bench_refuses PROPERTIES PASS_REGULAR_EXPRESSION "--captured-only: steps are captured on a GPU")
  endif()
endif()
