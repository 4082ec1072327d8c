#pragma once
// Mixed precision.
#include "halftone/amp/autocast.h"
#include "halftone/amp/inspect.h"
#include "halftone/amp/levels.h"
#include "halftone/amp/memory.h"
#include "halftone/amp/scaler.h"
#include "halftone/amp/trace.h"
