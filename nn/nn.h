#pragma once
// Every module a program can use, and how weights start.
#include "halftone/nn/init.h"
#include "halftone/nn/layers.h"
#include "halftone/nn/module.h"
