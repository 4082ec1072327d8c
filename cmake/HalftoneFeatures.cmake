# Optional parts of the library. Each is AUTO (used where it is found), ON (stop if it is not) or
# OFF.
#
#   halftone_feature(NAME "what to install" [NEEDS FEATURE] [TARGETS imported...])
#
# gives HALFTONE_HAS_NAME (0 or 1), and adds the targets to HALFTONE_LINKS.

set(HALFTONE_LINKS Threads::Threads)
set(HALFTONE_FEATURES)  # "CUDA 13.0", ... for build_info()
set(HALFTONE_SUMMARY)

# A package that the build cannot do without. The version is compared here: asked for 2, the package
# file of a version 3 would call itself unfit.
macro(halftone_require package version debian)
  find_package(${package} QUIET)
  if(NOT ${package}_FOUND OR (${package}_VERSION AND ${package}_VERSION VERSION_LESS ${version}))
    message(FATAL_ERROR "Halftone needs ${package} ${version} or later: install ${debian}, "
                        "or name its place in CMAKE_PREFIX_PATH.")
  endif()
endmacro()

# nvcc is looked for where the toolkit's own installer puts it, too: it is seldom on the PATH.
function(halftone_find_cuda)
  if(NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
    find_program(HALFTONE_NVCC nvcc HINTS ENV CUDAToolkit_ROOT ENV CUDA_PATH PATHS /usr/local/cuda
                 PATH_SUFFIXES bin)
    mark_as_advanced(HALFTONE_NVCC)
    if(HALFTONE_NVCC)
      set(ENV{CUDACXX} ${HALFTONE_NVCC})
    endif()
  endif()
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    find_package(CUDAToolkit 12.4 QUIET)
  endif()
  set(CUDA_FOUND ${CUDAToolkit_FOUND} PARENT_SCOPE)
  set(CUDA_VERSION ${CUDAToolkit_VERSION} PARENT_SCOPE)
endfunction()

function(halftone_feature name cure)
  cmake_parse_arguments(PARSE_ARGV 2 arg "" NEEDS TARGETS)
  set(HALFTONE_${name} AUTO CACHE STRING "Use ${name}: AUTO, ON or OFF")
  set_property(CACHE HALFTONE_${name} PROPERTY STRINGS AUTO ON OFF)
  string(TOUPPER "${HALFTONE_${name}}" wanted)

  set(has 0)
  set(found "off")
  if(wanted STREQUAL AUTO OR wanted)
    if(arg_NEEDS AND NOT HALFTONE_HAS_${arg_NEEDS})
      set(found "needs ${arg_NEEDS}, which is not in this build")
    else()
      if(name STREQUAL CUDA)
        halftone_find_cuda()
      else()
        set(MPI_CXX_SKIP_MPICXX ON)  # the C interface; MPI's own C++ one is long withdrawn
        find_package(${name} QUIET)
        foreach(spelling MPI_CXX_VERSION ZLIB_VERSION_STRING PNG_VERSION_STRING)  # modules with their own
          if(spelling MATCHES "^${name}_")
            set(${name}_VERSION ${${spelling}})
          endif()
        endforeach()
      endif()
      if(${name}_FOUND)
        set(has 1)
        set(found "${name} ${${name}_VERSION}")
      else()
        set(found "not found (wants ${cure})")
      endif()
    endif()
    if(NOT has AND NOT wanted STREQUAL AUTO)
      message(FATAL_ERROR "HALFTONE_${name}=${HALFTONE_${name}}: ${name} ${found}. If it is "
                          "installed somewhere unusual, name the place in CMAKE_PREFIX_PATH.")
    endif()
  endif()

  if(has)
    list(APPEND HALFTONE_LINKS ${arg_TARGETS})
    list(APPEND HALFTONE_FEATURES ${found})
  endif()
  list(APPEND HALFTONE_SUMMARY "HALFTONE_${name}=${HALFTONE_${name}}: ${found}")
  foreach(variable HALFTONE_LINKS HALFTONE_FEATURES HALFTONE_SUMMARY)
    set(${variable} ${${variable}} PARENT_SCOPE)
  endforeach()
  set(HALFTONE_HAS_${name} ${has} PARENT_SCOPE)
endfunction()

function(halftone_summary)
  list(JOIN HALFTONE_SUMMARY "\n--   " lines)
  get_target_property(kind halftone TYPE)
  message(STATUS "Halftone ${PROJECT_VERSION}, ${kind}, ${CMAKE_BUILD_TYPE}, operators for "
                 "${HALFTONE_PROCESSOR}\n--   ${lines}")
endfunction()
