# Not oneDNN's own package file: it stops the configuration where OpenCL's headers are missing.
include(${CMAKE_CURRENT_LIST_DIR}/HalftoneFindLibrary.cmake)
halftone_find_library(ONEDNN oneapi/dnnl/dnnl.hpp dnnl oneapi/dnnl/dnnl_version.h
                      DNNL_VERSION_MAJOR DNNL_VERSION_MINOR DNNL_VERSION_PATCH)
