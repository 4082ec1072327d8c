// All of data.
#pragma once

#include "halftone/data/dataset.h"
#include "halftone/data/idx.h"
#include "halftone/data/loader.h"
#include "halftone/data/mnist.h"
#include "halftone/data/sampler.h"
