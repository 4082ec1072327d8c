include(${CMAKE_CURRENT_LIST_DIR}/HalftoneFindLibrary.cmake)
halftone_find_library(CUDNN cudnn.h cudnn cudnn_version.h CUDNN_MAJOR CUDNN_MINOR CUDNN_PATCHLEVEL)

# Our own sources want the headers of cudnn-frontend, too, which scripts/install_dependencies brings;
# a program that links the library does not.
if(DEFINED HALFTONE_THIRD_PARTY)
  find_path(CUDNN_FRONTEND_INCLUDE_DIR cudnn_frontend.h HINTS ${HALFTONE_THIRD_PARTY}/include)
  mark_as_advanced(CUDNN_FRONTEND_INCLUDE_DIR)
  if(NOT CUDNN_FRONTEND_INCLUDE_DIR)
    set(CUDNN_FOUND FALSE)
  elseif(CUDNN_FOUND)
    target_include_directories(CUDNN::CUDNN SYSTEM INTERFACE ${CUDNN_FRONTEND_INCLUDE_DIR})
  endif()
endif()
