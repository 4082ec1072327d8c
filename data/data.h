// All of data.
#pragma once

#include "halftone/data/cifar.h"
#include "halftone/data/csv.h"
#include "halftone/data/dataset.h"
#include "halftone/data/idx.h"
#include "halftone/data/image.h"
#include "halftone/data/loader.h"
#include "halftone/data/mnist.h"
#include "halftone/data/sampler.h"
#include "halftone/data/text.h"
#include "halftone/data/transform.h"
