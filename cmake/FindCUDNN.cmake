include(${CMAKE_CURRENT_LIST_DIR}/HalftoneFindLibrary.cmake)
halftone_find_library(CUDNN cudnn.h cudnn cudnn_version.h CUDNN_MAJOR CUDNN_MINOR CUDNN_PATCHLEVEL)
