// An interpreter of PTX: runs a kernel from the text that NVRTC makes of it, lane by lane, harsher than a GPU does.
//
// Lanes of a warp that diverge run in random order and meet again only where an instruction with `.sync` waits for
// them; warps interleave at random. Each access is checked: bounds, alignment, and races, which are found by what
// orders two accesses (a lane's own order, bar.warp.sync within a warp, bar.sync within a block, membar and an atomic
// between warps) and not by what happens to run first. Each bit of a register or of shared memory that was never written is undefined, and may
// be copied and masked out, but neither decide a branch or an address nor reach global memory.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <unordered_map>
#include <vector>

namespace simcuda::ptx {

using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;
using i16 = int16_t;
using i32 = int32_t;
using i64 = int64_t;

constexpr int LANES = 32;

// A kind as in `u32`: p (predicate), b, u, s or f; and its bits.
struct Type {
    char kind = 0;
    u8 bits = 0;
};

enum class Code : u8 {
    ABS, ADD, AND, ATOM, BAR, BFI, BRA, CLZ, CVT, CVTA, DIV, EXIT, LD, MAD, MAX, MEMBAR, MIN, MOV, MUL, NEG, NOT, OR,
    PACK, POPC, PRMT, RCP, REM, SELP, SETP, SHFL, SHL, SHR, ST, SUB, UNPACK, VOTE, XOR
};

enum class Space : u8 { GENERIC, GLOBAL, SHARED, PARAM };
enum class Part : u8 { NONE, LOW, HIGH, WIDE };
enum class Compare : u8 { EQ, NE, LT, LE, GT, GE, EQU, NEU, LTU, LEU, GTU, GEU };
enum class Shuffle : u8 { IDX, UP, DOWN, BFLY };

constexpr u32 NOWHERE = ~0u;  // the operand `_`

// Registers, special registers and constants are slots; a constant has the same value in all lanes.
struct Instruction {
    Code code;
    Space space = Space::GENERIC;
    Part part = Part::NONE;
    Compare compare = Compare::EQ;
    Shuffle shuffle = Shuffle::IDX;
    bool sync = false, guarded = false, negated = false, strong = false, toward_zero = false, to_space = false;
    bool of_warp = false;  // of bar: not of all warps of a block
    Type type, source;  // `source` of cvt
    u32 guard = 0, target = 0, line = 0;
    u32 to[4] = {NOWHERE, NOWHERE, NOWHERE, NOWHERE}, from[4] = {}, width = 1;
    i64 offset = 0;
    std::string text;
};

struct Kernel {
    std::string name;
    std::vector<std::pair<std::string, u32>> shared;  // arrays and their offsets
    std::vector<std::string> parameters;
    std::string kinds;  // of the parameters: d (double) or w (anything else)
    std::vector<Instruction> code;
    std::vector<u64> constants;
    u32 registers = 0, shared_bytes = 0;  // `registers` counts the special ones, which come last
    bool fences = false;  // something orders warps
};

// A module: its kernels, and its constants in memory.
struct Program {
    std::map<std::string, Kernel> kernels;
    std::map<std::string, u64> globals;  // offsets
    std::vector<u64> memory;

    u64 base() const { return (u64)memory.data(); }
    u64 nbytes() const { return memory.size() * 8; }
};

// Reads the text of a module; throws a std::string that says what it does not know.
std::shared_ptr<Program> parse(const std::string &text);

// Where an interpreted kernel may access global memory: the live allocation around an address, and how far the bytes
// are from there in this process.
struct Span {
    u64 start = 0, end = 0;
    i64 shift = 0;
};

// What a kernel did, for a table.
struct Profile {
    u64 launches = 0, warps = 0, instructions = 0, lanes = 0;  // warps' instructions, and those of lanes
    u64 loads = 0, load_bytes = 0, load_sectors = 0;           // of global memory, in sectors of 32 bytes
    u64 stores = 0, store_bytes = 0, store_sectors = 0;
    u64 shared = 0, shared_cycles = 0, atomics = 0, shuffles = 0;
};

enum class End { DONE, ILLEGAL_ADDRESS, MISALIGNED, FAILED };

struct Launch {
    const Program *program;
    const Kernel *kernel;
    std::vector<u64> arguments;
    u32 blocks, threads;
    u64 seed;
    bool lockstep;  // lanes that diverge meet again as soon as they can, as on a GPU that nothing disturbs
    std::function<bool(u64 address, Span *)> resolve;
    std::function<void(u64 address, u64 nbytes, bool write)> accessed;
    std::function<void(const std::string &)> find;
    Profile *profile;
};

// Runs a grid. If the kernel cannot go on, says so by `find` and returns why.
End run(Launch &launch);

}  // namespace simcuda::ptx
