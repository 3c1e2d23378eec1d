// StopMatcher: stop strings, which may begin in one token and end in another.
//   The same as detokenizer_proc/parsers/stops.py, on UTF-8: text comes in whole characters, so
//   bytes match where characters do.

#pragma once

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

namespace headrace {

class StopMatcher {
public:
    StopMatcher(std::vector<std::string> stops, bool include_stop)
        : stops_(std::move(stops)), include_stop_(include_stop) {}

    bool stopped() const { return stopped_; }

    // Append the text that is now certain to come before any stop string.
    void feed(const std::string &text, std::string &out) {
        if (stops_.empty()) {
            out += text;
            return;
        }
        held_ += text;
        if (find(out)) {
            return;
        }
        size_t keep = 0;
        for (const std::string &stop : stops_) {
            keep = std::max(keep, overlap(stop));
        }
        out.append(held_, 0, held_.size() - keep);
        held_.erase(0, held_.size() - keep);
    }

    // Append what was held back, at the end.
    void flush(std::string &out) {
        out += held_;
        held_.clear();
    }

private:
    // Look for the stop that is complete first, so that how text comes in pieces changes nothing.
    bool find(std::string &out) {
        std::pair<size_t, size_t> first{std::string::npos, 0}; // its end, then its start
        for (const std::string &stop : stops_) {
            const size_t at = held_.find(stop);
            if (at != std::string::npos) {
                first = std::min(first, {at + stop.size(), at});
            }
        }
        if (first.first == std::string::npos) {
            return false;
        }
        out.append(held_, 0, include_stop_ ? first.first : first.second);
        held_.clear();
        stopped_ = true;
        return true;
    }

    // The length of the longest end of the text that begins `stop`, less than all of it.
    size_t overlap(const std::string &stop) const {
        for (size_t length = std::min(held_.size(), stop.size() - 1); length > 0; --length) {
            if (held_.compare(held_.size() - length, length, stop, 0, length) == 0) {
                return length;
            }
        }
        return 0;
    }

    std::vector<std::string> stops_;
    std::string held_;
    bool include_stop_, stopped_ = false;
};

} // namespace headrace
