// The user's own library, built on Halftone: an operator that Halftone does not have.
#pragma once

#include <halftone/halftone.h>

struct Snake {
  static constexpr auto name = "snake", doc = "x + sin(x)^2";
  static constexpr halftone::Cast cast = halftone::Cast::keep;
  template <class T> HT_HD static T f(T x) {
    T s = ::sin(x);
    return x + s * s;
  }
  static halftone::Tensor df(const halftone::Tensor& x, const halftone::Tensor&, const halftone::Tensor& g) {
    return g * (1 + halftone::sin(2 * x));
  }
};
HT_REGISTER_UNARY(snake, Snake)

// The address of Halftone's version text as this library sees it.
const char* version_seen_by_extension();
