# Turns nvcc on. One architecture unless the builder names others: each costs a third of a build.
# Never `native`, which fails where there is no GPU.
if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_ARCHITECTURES 90)
endif()
# One CUDA runtime in the process, the one that cuBLAS and the program use too.
if(NOT DEFINED CMAKE_CUDA_RUNTIME_LIBRARY)
  set(CMAKE_CUDA_RUNTIME_LIBRARY Shared)
endif()
if(CMAKE_CUDA_ARCHITECTURES MATCHES "(^|;)(90|all)")  # for sources that name it: see HalftoneLibrary.cmake
  set(HALFTONE_HAS_WGMMA 1)
endif()
enable_language(CUDA)
find_package(CUDAToolkit REQUIRED)

# CMake 3.25 knows no C++20 flag for nvcc and would drop the standard without a word.
if(CMAKE_CUDA_COMPILER_ID STREQUAL NVIDIA AND NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
  set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION -std=c++20)
  list(APPEND CMAKE_CUDA_COMPILE_FEATURES cuda_std_20)
endif()
