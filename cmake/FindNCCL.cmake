include(${CMAKE_CURRENT_LIST_DIR}/HalftoneFindLibrary.cmake)
halftone_find_library(NCCL nccl.h nccl nccl.h NCCL_MAJOR NCCL_MINOR NCCL_PATCH)
