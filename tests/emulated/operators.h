#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>

namespace emulated {

// How often each operator drained its stream and ran in the caller.
std::unordered_map<std::string, int64_t> run_at_once_counts();

} // namespace emulated
