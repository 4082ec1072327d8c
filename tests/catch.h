// Catch2, version 2 or 3, and how a test says that it cannot run here.
#pragma once

#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
using Catch::Approx;
namespace Catch {
using TestEventListenerBase = EventListenerBase;
}
#else
#include <catch2/catch.hpp>
#endif

// Test cases that HT_SKIP left. A process that left every case ends with 77: skipped, for CTest.
inline int skipped_cases = 0;

// HT_SKIP("no CUDA device"): leaves the test case, visibly.
#define HT_SKIP(reason)            \
  do {                             \
    ++skipped_cases;               \
    WARN("skipped: " << (reason)); \
    return;                        \
  } while (false)
