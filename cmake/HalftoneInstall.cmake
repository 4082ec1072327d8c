# The installed tree: headers as they lie here, the library, and a package file that may be moved.
include(CMakePackageConfigHelpers)
set(package ${CMAKE_INSTALL_LIBDIR}/cmake/Halftone)

install(TARGETS halftone EXPORT HalftoneTargets)
foreach(level ${HALFTONE_LEVEL_LIBRARIES})
  install(TARGETS halftone-${level} LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}/glibc-hwcaps/${level} NAMELINK_SKIP)
endforeach()
install(EXPORT HalftoneTargets NAMESPACE Halftone:: DESTINATION ${package})
foreach(folder ${folders})
  if(EXISTS ${PROJECT_SOURCE_DIR}/${folder})
    install(DIRECTORY ${folder} DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/halftone
            FILES_MATCHING PATTERN "*.h" PATTERN fashion-mnist-subset EXCLUDE)
  endif()
endforeach()
install(FILES halftone.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/halftone OPTIONAL)
if(HALFTONE_HAS_CUDA)
  install(DIRECTORY cuda DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/halftone
          FILES_MATCHING PATTERN "*.cuh" PATTERN "runtime.h")
endif()

# A static library leaves its parts to be linked by the program, so their packages must be found.
set(HALFTONE_DEPENDENCIES)
if(NOT BUILD_SHARED_LIBS)
  set(HALFTONE_DEPENDENCIES Threads)
  foreach(part CUDA CUDNN NCCL MPI ONEDNN ZLIB PNG)
    if(HALFTONE_HAS_${part})
      list(APPEND HALFTONE_DEPENDENCIES ${part})
    endif()
  endforeach()
  list(TRANSFORM HALFTONE_DEPENDENCIES REPLACE "^CUDA$" CUDAToolkit)
endif()
configure_package_config_file(
  ${PROJECT_SOURCE_DIR}/cmake/HalftoneConfig.cmake.in ${PROJECT_BINARY_DIR}/HalftoneConfig.cmake
  INSTALL_DESTINATION ${package} NO_SET_AND_CHECK_MACRO NO_CHECK_REQUIRED_COMPONENTS_MACRO)
write_basic_package_version_file(${PROJECT_BINARY_DIR}/HalftoneConfigVersion.cmake
                                 COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/HalftoneConfig.cmake
              ${PROJECT_BINARY_DIR}/HalftoneConfigVersion.cmake
              ${PROJECT_SOURCE_DIR}/cmake/HalftoneFindLibrary.cmake
              ${PROJECT_SOURCE_DIR}/cmake/FindCUDNN.cmake
              ${PROJECT_SOURCE_DIR}/cmake/FindNCCL.cmake
              ${PROJECT_SOURCE_DIR}/cmake/FindONEDNN.cmake
        DESTINATION ${package})
