// The states of sequences in layers that have some: slots of [layers' states], fp32. A step reads a
// slot and writes another, which the engine names: it may be run again.
#pragma once
#include "cpu/operands.h"

namespace headrace {

class StateSlots {
public:
    // In `memory`, or in memory of their own where that is null. Throws std::bad_alloc.
    void allocate(int num_slots, size_t slot_numbers, void *memory) {
        num_slots_ = num_slots;
        slot_numbers_ = slot_numbers;
        if (memory) {
            buffer_.borrow(memory);
        } else {
            buffer_.allocate(num_slots * slot_numbers * sizeof(float));
        }
    }

    bool used() const { return slot_numbers_ > 0; }
    int num_slots() const { return num_slots_; }
    float *slot(int index) const { return buffer_.as<float>() + index * slot_numbers_; }

private:
    int num_slots_ = 0;
    size_t slot_numbers_ = 0;
    Buffer buffer_;
};

} // namespace headrace
