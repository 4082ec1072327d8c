#pragma once
// Every optimizer.
#include "halftone/optim/adam.h"
#include "halftone/optim/adaptive.h"
#include "halftone/optim/average.h"
#include "halftone/optim/layerwise.h"
#include "halftone/optim/lbfgs.h"
#include "halftone/optim/schedule.h"
#include "halftone/optim/sgd.h"
