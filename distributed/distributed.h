#pragma once
// Several devices and processes.
#include "halftone/distributed/data_parallel.h"
#include "halftone/distributed/distributed_data_parallel.h"
#include "halftone/distributed/group.h"
#include "halftone/distributed/sharded_state.h"
#include "halftone/distributed/shared_position.h"
#include "halftone/distributed/sync_batch_norm.h"
