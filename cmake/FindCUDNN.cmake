include(${CMAKE_CURRENT_LIST_DIR}/HalftoneFindLibrary.cmake)
halftone_find_library(CUDNN cudnn.h cudnn cudnn_version.h CUDNN_MAJOR CUDNN_MINOR CUDNN_PATCHLEVEL)

# Our own sources want the headers of cudnn-frontend, too, which scripts/install_dependencies brings;
# a program that links the library does not.
if(DEFINED HALFTONE_THIRD_PARTY)
  find_path(CUDNN_FRONTEND_INCLUDE_DIR cudnn_frontend.h HINTS ${HALFTONE_THIRD_PARTY}/include)
  mark_as_advanced(CUDNN_FRONTEND_INCLUDE_DIR)
  set(CUDNN_FRONTEND_VERSION)
  if(EXISTS "${CUDNN_FRONTEND_INCLUDE_DIR}/cudnn_frontend_version.h")
    foreach(number MAJOR MINOR)
      file(STRINGS "${CUDNN_FRONTEND_INCLUDE_DIR}/cudnn_frontend_version.h" line LIMIT_COUNT 1
           REGEX "^#define[ \t]+CUDNN_FRONTEND_${number}_VERSION[ \t]+[0-9]+")
      string(REGEX MATCH "[0-9]+[ \t]*$" line "${line}")
      list(APPEND CUDNN_FRONTEND_VERSION ${line})
    endforeach()
    list(JOIN CUDNN_FRONTEND_VERSION . CUDNN_FRONTEND_VERSION)
  endif()
  # 1.15 is the first whose attention lets us choose its implementation.
  if(NOT CUDNN_FRONTEND_INCLUDE_DIR OR CUDNN_FRONTEND_VERSION VERSION_LESS 1.15)
    set(CUDNN_FOUND FALSE)
  elseif(CUDNN_FOUND)
    target_include_directories(CUDNN::CUDNN SYSTEM INTERFACE ${CUDNN_FRONTEND_INCLUDE_DIR})
  endif()
endif()
