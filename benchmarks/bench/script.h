#pragma once
// benchmarks/peers/peers.py, which the build makes a part of the program.
namespace benchmarks {

extern const char* const peers_script;

}  // namespace benchmarks
