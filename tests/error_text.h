// An exact error text, counted by the scoreboard.
#pragma once

#include "halftone/tests/catch.h"
#include "halftone/tests/scoreboard.h"

#define TEXT(expression, text)             \
  do {                                     \
    CHECK_THROWS_WITH(expression, text);   \
    halftone::tests::count("error_texts"); \
  } while (false)
