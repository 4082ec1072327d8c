#pragma once
// Every optimizer.
#include "halftone/optim/adam.h"
#include "halftone/optim/sgd.h"
