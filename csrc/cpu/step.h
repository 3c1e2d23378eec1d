// One step, as the executor calls it.
#pragma once
#include "cpu/model.h"

namespace headrace {

// False when an id, position, sequence, page or row is out of range.
bool is_valid(const Model &model, const Step &step);

void run_step(Model &model, const Step &step); // throws std::bad_alloc

} // namespace headrace
