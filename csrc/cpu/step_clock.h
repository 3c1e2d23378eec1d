// Where the time of steps goes, as the thread that calls them sees it: for bench/core_roofline.py.
#pragma once
#include <chrono>

namespace headrace {

// What a step consists of. `waiting` is for other threads at the end of a parallel phase.
enum class StepPart { rows, products, attention, experts, head, waiting, count };

class StepClock {
public:
    bool is_on = false; // off, it costs one branch
    double seconds[int(StepPart::count)] = {};

    // Begin a part; returns the one that ends.
    StepPart enter(StepPart part) {
        const StepPart before = part_;
        if (is_on) {
            const auto now = std::chrono::steady_clock::now();
            seconds[int(before)] += std::chrono::duration<double>(now - since_).count();
            since_ = now;
        }
        part_ = part;
        return before;
    }
    void begin_step() {
        part_ = StepPart::rows;
        since_ = std::chrono::steady_clock::now();
    }
    void end_step() { enter(StepPart::rows); }

private:
    StepPart part_ = StepPart::rows;
    std::chrono::steady_clock::time_point since_;
};

} // namespace headrace
