#pragma once
// Every operator a program can call.
#include "halftone/ops/binary.h"
#include "halftone/ops/copy.h"
#include "halftone/ops/elementwise_cpu.h"
#include "halftone/ops/index.h"
#include "halftone/ops/loss.h"
#include "halftone/ops/matmul.h"
#include "halftone/ops/random.h"
#include "halftone/ops/reduce.h"
#include "halftone/ops/shape.h"
#include "halftone/ops/softmax.h"
#include "halftone/ops/unary.h"
#include "halftone/ops/update.h"
