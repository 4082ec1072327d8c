# The library, from every source in its folders.
#
# A source whose name holds the name of an optional part (`onednn.cpp`, `conv_cudnn.cpp`) is
# compiled only where that part is found; so no source asks `#if`.
set(folders core ops autograd amp nn optim distributed data io train)
set(patterns ${folders})
list(TRANSFORM patterns APPEND /*.cpp)
if(HALFTONE_HAS_CUDA)
  list(APPEND patterns cuda/*.cu cuda/*.cpp)
endif()
list(TRANSFORM patterns PREPEND ${PROJECT_SOURCE_DIR}/)
file(GLOB sources CONFIGURE_DEPENDS RELATIVE ${PROJECT_SOURCE_DIR} ${patterns})

# A backend registers itself in a function that the library's core calls by name: nothing that a
# linker could drop. A part with sources of its own is such a backend.
set(HALFTONE_DECLARATIONS)
set(HALFTONE_CALLS)
foreach(part CUDA WGMMA CUDNN NCCL MPI ONEDNN ZLIB PNG)
  string(TOLOWER ${part} word)
  set(own ${sources})
  if(part STREQUAL CUDA)
    list(FILTER own INCLUDE REGEX "^cuda/")
  else()
    list(FILTER own INCLUDE REGEX "[/_]${word}(_[a-z0-9_]*)?[.]")
  endif()
  if(own AND HALFTONE_HAS_${part})
    string(APPEND HALFTONE_DECLARATIONS "void register_${word}();\n")
    string(APPEND HALFTONE_CALLS "  register_${word}();\n")
  elseif(own)
    list(REMOVE_ITEM sources ${own})
  endif()
endforeach()
set(generated ${PROJECT_BINARY_DIR}/generated/halftone)
list(JOIN HALFTONE_FEATURES ", " HALFTONE_FEATURES)
configure_file(${PROJECT_SOURCE_DIR}/cmake/config.h.in ${generated}/config.h @ONLY)
configure_file(${PROJECT_SOURCE_DIR}/cmake/backends.cpp.in ${generated}/backends.cpp @ONLY)

# Instructions of one architecture alone, compiled for it alone.
set(of_one_architecture)
if(HALFTONE_HAS_WGMMA)
  set(own ${sources})
  list(FILTER own INCLUDE REGEX "_wgmma[.]cu$")
  list(REMOVE_ITEM sources ${own})
  list(TRANSFORM own PREPEND ${PROJECT_SOURCE_DIR}/)
  add_library(halftone_wgmma OBJECT ${own})
  set_target_properties(halftone_wgmma PROPERTIES CUDA_ARCHITECTURES 90a-real POSITION_INDEPENDENT_CODE ON)
  halftone_compile(halftone_wgmma)
  target_compile_features(halftone_wgmma PRIVATE cxx_std_20)
  target_include_directories(halftone_wgmma PRIVATE ${PROJECT_BINARY_DIR}/include ${PROJECT_BINARY_DIR}/generated)
  set(of_one_architecture $<TARGET_OBJECTS:halftone_wgmma>)
endif()

list(TRANSFORM sources PREPEND ${PROJECT_SOURCE_DIR}/)
add_library(halftone ${sources} ${of_one_architecture} ${generated}/backends.cpp)
add_library(Halftone::halftone ALIAS halftone)
halftone_compile(halftone)
target_compile_features(halftone PUBLIC cxx_std_20)
set_target_properties(halftone PROPERTIES
  VERSION ${PROJECT_VERSION}
  HALFTONE_CUDA "${HALFTONE_HAS_CUDA}"  # for projects that bring kernels of their own
  EXPORT_PROPERTIES HALFTONE_CUDA
  SOVERSION ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR}
  INSTALL_RPATH $ORIGIN
  INSTALL_RPATH_USE_LINK_PATH ON)

# Files are included as "halftone/core/tensor.h", here as in an installed tree.
file(MAKE_DIRECTORY ${PROJECT_BINARY_DIR}/include)
file(CREATE_LINK ${PROJECT_SOURCE_DIR} ${PROJECT_BINARY_DIR}/include/halftone SYMBOLIC)
target_include_directories(halftone
  PUBLIC $<BUILD_INTERFACE:${PROJECT_BINARY_DIR}/include>
         $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>
  PRIVATE ${PROJECT_BINARY_DIR}/generated)
target_link_libraries(halftone PRIVATE
  ${HALFTONE_LINKS}
  $<BUILD_INTERFACE:Eigen3::Eigen>
  $<BUILD_INTERFACE:nlohmann_json::nlohmann_json>)
if(BUILD_SHARED_LIBS AND NOT APPLE)  # a part that is found but unused costs nothing
  target_link_options(halftone PRIVATE LINKER:--as-needed)
endif()

# The CPU operators: vectorised loops, but no option that may change a result.
set(operators ${sources})
list(FILTER operators INCLUDE REGEX "/ops/[^/]*[.]cpp$")
set(options ${HALFTONE_MARCH_FLAG} -fno-math-errno -fno-trapping-math
            $<$<CONFIG:Release,RelWithDebInfo>:-O3>)
set_source_files_properties(${operators} PROPERTIES
  COMPILE_DEFINITIONS "EIGEN_DONT_PARALLELIZE;EIGEN_MPL2_ONLY"
  COMPILE_OPTIONS "${options}")
# Random draws have the CPU's bits, which a fused multiply-add would change.
set_source_files_properties(${PROJECT_SOURCE_DIR}/cuda/random.cu PROPERTIES COMPILE_OPTIONS --fmad=false)

# Where they are for any processor, they are compiled once more for each level of x86-64: the loader takes the library of the
# highest that runs here, from glibc-hwcaps/<level>/ beside the plain one (ld.so(8)). All else in it is the plain one's.
set(HALFTONE_LEVEL_LIBRARIES)
if(NOT HALFTONE_MARCH_FLAG AND BUILD_SHARED_LIBS AND CMAKE_SYSTEM_NAME STREQUAL Linux AND CMAKE_SYSTEM_PROCESSOR STREQUAL x86_64)
  foreach(level ${HALFTONE_LEVELS})
    set(library halftone-${level})
    add_library(${library} SHARED ${operators} ${of_one_architecture} $<FILTER:$<TARGET_OBJECTS:halftone>,EXCLUDE,/ops/>)
    halftone_compile(${library})
    target_compile_options(${library} PRIVATE -march=${level})
    target_compile_features(${library} PRIVATE cxx_std_20)
    target_include_directories(${library} PRIVATE ${PROJECT_BINARY_DIR}/include ${PROJECT_BINARY_DIR}/generated)
    target_link_libraries(${library} PRIVATE ${HALFTONE_LINKS} Eigen3::Eigen nlohmann_json::nlohmann_json)
    target_link_options(${library} PRIVATE LINKER:--as-needed)
    set_target_properties(${library} PROPERTIES
      OUTPUT_NAME halftone
      LIBRARY_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/glibc-hwcaps/${level}
      VERSION ${PROJECT_VERSION}
      SOVERSION ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR}
      INSTALL_RPATH $ORIGIN/../..
      INSTALL_RPATH_USE_LINK_PATH ON)
    list(APPEND HALFTONE_LEVEL_LIBRARIES ${level})
    string(APPEND HALFTONE_PROCESSOR ", ${level}")
  endforeach()
endif()
