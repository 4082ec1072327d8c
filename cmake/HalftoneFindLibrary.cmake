# The shape that our find modules share: one header, one library, a version in a header's #defines.
#
#   halftone_find_library(NAME header library version-header major minor patch)
#
# gives NAME_FOUND, NAME_VERSION and the target NAME::NAME.
include(FindPackageHandleStandardArgs)

macro(halftone_find_library name header library version_header)
  find_path(${name}_INCLUDE_DIR ${header} HINTS ${CUDAToolkit_INCLUDE_DIRS})
  find_library(${name}_LIBRARY ${library} HINTS ${CUDAToolkit_LIBRARY_DIR})
  mark_as_advanced(${name}_INCLUDE_DIR ${name}_LIBRARY)
  set(${name}_VERSION)
  if(EXISTS "${${name}_INCLUDE_DIR}/${version_header}")
    foreach(define ${ARGN})
      file(STRINGS "${${name}_INCLUDE_DIR}/${version_header}" line LIMIT_COUNT 1
           REGEX "^#define[ \t]+${define}[ \t]+[0-9]+")
      string(REGEX MATCH "[0-9]+[ \t]*$" number "${line}")
      list(APPEND ${name}_VERSION ${number})
    endforeach()
    list(JOIN ${name}_VERSION . ${name}_VERSION)
  endif()
  find_package_handle_standard_args(${name} REQUIRED_VARS ${name}_LIBRARY ${name}_INCLUDE_DIR
                                    VERSION_VAR ${name}_VERSION)
  if(${name}_FOUND AND NOT TARGET ${name}::${name})
    add_library(${name}::${name} UNKNOWN IMPORTED)
    set_target_properties(${name}::${name} PROPERTIES
      IMPORTED_LOCATION "${${name}_LIBRARY}"
      INTERFACE_INCLUDE_DIRECTORIES "${${name}_INCLUDE_DIR}")
  endif()
endmacro()
