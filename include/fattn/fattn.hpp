// The C++ API of fattn, whole. Header-only over the C ABI in fattn.h.
#pragma once

#include "fattn/append.hpp"
#include "fattn/attention.hpp"
#include "fattn/cache.hpp"
#include "fattn/device.hpp"
#include "fattn/error.hpp"
#include "fattn/group.hpp"
#include "fattn/options.hpp"
#include "fattn/plan.hpp"
#include "fattn/problem.hpp"
#include "fattn/ring.hpp"
#include "fattn/rows.hpp"
#include "fattn/system.hpp"
#include "fattn/tensors.hpp"
#include "fattn/types.hpp"
