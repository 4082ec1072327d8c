// All of io.
#pragma once

#include "halftone/io/chart.h"
#include "halftone/io/checkpoint.h"
#include "halftone/io/file.h"
#include "halftone/io/interrupt.h"
#include "halftone/io/log.h"
#include "halftone/io/progress.h"
#include "halftone/io/safetensors.h"
