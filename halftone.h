// All of Halftone's public headers. CUDA's, for operators of your own, is apart: cuda/extend.cuh.
#pragma once

#include <iostream>

#include "halftone/core/version.h"
