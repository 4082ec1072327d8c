// All of io.
#pragma once

#include "halftone/io/chart.h"
#include "halftone/io/checkpoint.h"
#include "halftone/io/chrome_trace.h"
#include "halftone/io/dlpack.h"
#include "halftone/io/file.h"
#include "halftone/io/interrupt.h"
#include "halftone/io/log.h"
#include "halftone/io/npy.h"
#include "halftone/io/onnx.h"
#include "halftone/io/png.h"
#include "halftone/io/progress.h"
#include "halftone/io/safetensors.h"
#include "halftone/io/tensorboard.h"
