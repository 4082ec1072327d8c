// HT_API marks what the shared library exports; everything else stays hidden in it.
#pragma once

#define HT_API __attribute__((visibility("default")))
