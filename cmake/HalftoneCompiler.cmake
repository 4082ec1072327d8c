# How our own files are compiled; nothing here reaches a program that uses the library, except the
# variables below, which end with our directory.
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_EXTENSIONS OFF)
set(CMAKE_CXX_VISIBILITY_PRESET hidden)
set(CMAKE_CUDA_VISIBILITY_PRESET hidden)
set(CMAKE_VISIBILITY_INLINES_HIDDEN ON)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)

if(PROJECT_IS_TOP_LEVEL)
  set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
  get_property(multi_config GLOBAL PROPERTY GENERATOR_IS_MULTI_CONFIG)
  if(NOT CMAKE_BUILD_TYPE AND NOT multi_config)
    set(CMAKE_BUILD_TYPE Release CACHE STRING "Debug, Release, RelWithDebInfo or MinSizeRel" FORCE)
  endif()
  # -O2 and line tables: back traces name lines at no cost in speed.
  set(CMAKE_CXX_FLAGS_RELEASE "-O2 -g1 -DNDEBUG")
  find_program(HALFTONE_CCACHE ccache)
  mark_as_advanced(HALFTONE_CCACHE)
  if(HALFTONE_CCACHE)
    foreach(language CXX CUDA)
      if(NOT DEFINED CMAKE_${language}_COMPILER_LAUNCHER)
        set(CMAKE_${language}_COMPILER_LAUNCHER ${HALFTONE_CCACHE})
      endif()
    endforeach()
  endif()
endif()

# The processor that the CPU operators are compiled for.
include(CheckCXXCompilerFlag)
set(HALFTONE_PROCESSOR "any processor of this kind")
set(HALFTONE_MARCH_FLAG)
if(HALFTONE_MARCH)
  set(HALFTONE_MARCH_FLAG -march=${HALFTONE_MARCH})
  set(HALFTONE_PROCESSOR ${HALFTONE_MARCH})
elseif(HALFTONE_NATIVE)
  check_cxx_compiler_flag(-march=native HALFTONE_KNOWS_NATIVE)
  if(HALFTONE_KNOWS_NATIVE)
    set(HALFTONE_MARCH_FLAG -march=native)
    set(HALFTONE_PROCESSOR "this processor")
  endif()
endif()

# Warnings and arithmetic of every target of ours. Contraction is off on the host, so results do not
# depend on whether a processor has fused multiply-add; device code keeps it.
function(halftone_compile target)
  target_compile_options(${target} PRIVATE
    $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wpedantic -Wshadow -ffp-contract=off>
    # GCC before 13 warns of its own headers of AVX512 (its bug 105593).
    $<$<AND:$<COMPILE_LANG_AND_ID:CXX,GNU>,$<VERSION_LESS:$<CXX_COMPILER_VERSION>,13>>:-Wno-maybe-uninitialized -Wno-uninitialized>
    $<$<COMPILE_LANGUAGE:CXX>:-fmacro-prefix-map=${PROJECT_BINARY_DIR}/include/=>
    $<$<COMPILE_LANGUAGE:CXX>:-fmacro-prefix-map=${PROJECT_SOURCE_DIR}/=halftone/>
    $<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-Wall,-Wextra,-ffp-contract=off>
    # 186: code for every dtype compares unsigned ones with 0, too.
    $<$<COMPILE_LANGUAGE:CUDA>:--diag-suppress=186>)
  if(HALFTONE_WERROR)
    target_compile_options(${target} PRIVATE
      $<$<COMPILE_LANGUAGE:CXX>:-Werror>
      $<$<COMPILE_LANGUAGE:CUDA>:-Werror=all-warnings>)
  endif()
endfunction()
