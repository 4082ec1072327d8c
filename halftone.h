// All of Halftone's public headers. CUDA's, for operators of your own, is apart: cuda/extend.cuh.
#pragma once

#include <iostream>

#include "halftone/amp/amp.h"
#include "halftone/autograd/autograd.h"
#include "halftone/autograd/checkpoint.h"
#include "halftone/autograd/function.h"
#include "halftone/autograd/gradcheck.h"
#include "halftone/core/backend.h"
#include "halftone/core/capture.h"
#include "halftone/core/parallel.h"
#include "halftone/core/state_dict.h"
#include "halftone/core/thread_state.h"
#include "halftone/core/tuning.h"
#include "halftone/core/version.h"
#include "halftone/core/warning.h"
#include "halftone/data/data.h"
#include "halftone/distributed/distributed.h"
#include "halftone/io/io.h"
#include "halftone/nn/nn.h"
#include "halftone/ops/ops.h"
#include "halftone/optim/optim.h"
#include "halftone/train/metrics.h"
#include "halftone/train/train.h"
