// Runs a grid of an interpreted kernel. See ptx.h for what it checks.
#include "ptx.h"

#include <algorithm>
#include <cmath>
#include <cstdarg>
#include <cstring>
#include <limits>
#include <type_traits>

namespace simcuda::ptx {

namespace {

constexpr u64 SHARED_WINDOW = 0x7e0000000000, SHARED_BYTES = 1 << 18;  // of generic addresses
constexpr u64 MOST_INSTRUCTIONS = 4'000'000'000, UNDEFINED = 0xdeadbeefdeadbeef;
constexpr u32 ALL = ~0u, MANY = ~0u, RESIDENT_BLOCKS = 2;
constexpr int BURST = 64, BLOCK_OF_CELLS = 256;

std::string format(const char *text, ...) __attribute__((format(printf, 1, 2)));
std::string format(const char *text, ...) {
    char buffer[512];
    va_list arguments;
    va_start(arguments, text);
    vsnprintf(buffer, sizeof buffer, text, arguments);
    va_end(arguments);
    return buffer;
}

template <class T>
T as(u64 bits) {
    T value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

template <class T>
u64 raw(T value) {
    u64 bits = 0;
    memcpy(&bits, &value, sizeof value);
    return bits;
}

u64 low_bits(int n) {
    return n >= 64 ? ~0ull : (1ull << n) - 1;
}

// Who accessed a byte last: a thread of the grid (from 1 on), and when in its warp's time.
struct Cell {
    u32 writer = 0, written = 0, reader_warp = 0, read = 0, readers = 0;
    bool atomic = false;
};

struct Block;

struct Warp {
    u32 index = 0, live = 0, pc[LANES] = {};
    bool waits = false;  // for the other warps of its block
    Block *block = nullptr;
    std::vector<u64> values, undefined;  // of a slot and lane
    std::vector<u32> tainted;            // of a slot: the lanes that have an undefined bit
    // Time: it advances where other threads may see what was done before. `met` is when all lanes met last.
    u32 now = 1, met = 0;
    std::vector<u32> seen, arriving, released;  // times of other warps
    bool releasing = false;                     // by the next atomic
};

struct Block {
    u32 index = 0, live = 0;
    std::vector<u8> shared, undefined;
    std::vector<Cell> cells;
    std::vector<std::unique_ptr<Warp>> warps;
};

struct Stop {
    End end;
};

class Grid {
public:
    explicit Grid(Launch &launch)
        : launch_(launch), kernel_(*launch.kernel), random_(launch.seed), warps_per_block_(launch.threads / LANES) {}

    void run() {
        std::vector<u32> order(launch_.blocks);
        for (u32 i = 0; i < launch_.blocks; ++i) order[i] = i;
        if (!launch_.lockstep) std::shuffle(order.begin(), order.end(), random_);
        std::vector<std::unique_ptr<Block>> resident;
        size_t next = 0;
        ++launch_.profile->launches;
        while (next < order.size() || !resident.empty()) {
            while (resident.size() < RESIDENT_BLOCKS && next < order.size()) resident.push_back(block(order[next++]));
            const size_t chosen = random_() % resident.size();
            Block &at = *resident[chosen];
            Warp &warp = *at.warps[random_() % at.warps.size()];
            if (warp.waits) continue;
            for (int i = 0; i < BURST && warp.live && !warp.waits; ++i) step(warp);
            if (!warp.live) {
                for (auto &one : at.warps)
                    if (one.get() == &warp) {
                        at.warps.erase(std::find(at.warps.begin(), at.warps.end(), one));
                        break;
                    }
                if (at.warps.empty())
                    resident.erase(resident.begin() + (long)chosen);
                else
                    let_pass(at);
            }
        }
    }

private:
    Launch &launch_;
    const Kernel &kernel_;
    std::mt19937_64 random_;
    u32 warps_per_block_;
    u64 executed_ = 0;
    Span last_span_{};
    std::unordered_map<u64, std::unique_ptr<Cell[]>> cells_;
    u64 last_page_ = ~0ull;
    Cell *last_cells_ = nullptr;
    std::unordered_map<u64, std::vector<u32>> released_;
    std::unordered_map<u64, std::map<u32, u32>> atomics_;  // of a word of global memory: warps, and when each changed it

    std::unique_ptr<Block> block(u32 index) {
        auto made = std::make_unique<Block>();
        made->index = index;
        made->shared.assign(kernel_.shared_bytes, 0xee);
        made->undefined.assign(kernel_.shared_bytes, 0xff);
        made->cells.resize(kernel_.shared_bytes);
        for (u32 i = 0; i < warps_per_block_; ++i) {
            auto warp = std::make_unique<Warp>();
            warp->index = index * warps_per_block_ + i;
            warp->block = made.get();
            warp->live = ALL;
            const size_t slots = kernel_.registers + kernel_.constants.size();
            warp->values.assign(slots * LANES, UNDEFINED);
            warp->undefined.assign(slots * LANES, ~0ull);
            warp->tainted.assign(slots, ALL);
            const u64 special[] = {0, index, launch_.threads, launch_.blocks};
            for (u32 s = 0; s < 4; ++s)
                for (int lane = 0; lane < LANES; ++lane)
                    set(*warp, kernel_.registers - 4 + s, lane, s ? special[s] : i * LANES + (u64)lane);
            for (size_t c = 0; c < kernel_.constants.size(); ++c)
                for (int lane = 0; lane < LANES; ++lane) set(*warp, kernel_.registers + (u32)c, lane, kernel_.constants[c]);
            if (kernel_.fences) {
                warp->seen.assign((size_t)launch_.blocks * warps_per_block_, 0);
                warp->arriving = warp->seen;
            }
            ++launch_.profile->warps;
            made->warps.push_back(std::move(warp));
        }
        return made;
    }

    static void set(Warp &warp, u32 slot, int lane, u64 value) {
        warp.values[slot * LANES + (u32)lane] = value;
        warp.tainted[slot] &= ~(1u << lane);
    }

    std::string where(const Warp &warp, const Instruction &at) const {
        return format("ptx: %s, block %u, warp %u, line %u '%s': ", kernel_.name.c_str(), warp.block->index,
                      warp.index % warps_per_block_, at.line, at.text.c_str());
    }

    void find(const Warp &warp, const Instruction &at, const std::string &what) const {
        launch_.find(where(warp, at) + what);
    }

    [[noreturn]] void stop(const Warp &warp, const Instruction &at, const std::string &what, End end) const {
        find(warp, at, what);
        throw Stop{end};
    }

    // Registers.

    u64 value(const Warp &warp, u32 slot, int lane) const { return warp.values[slot * LANES + (u32)lane]; }

    u64 undefined(const Warp &warp, u32 slot, int lane) const {
        return warp.tainted[slot] >> lane & 1 ? warp.undefined[slot * LANES + (u32)lane] : 0;
    }

    void put(Warp &warp, u32 slot, int lane, u64 value, u64 undefined) const {
        if (slot == NOWHERE) return;
        warp.values[slot * LANES + (u32)lane] = value;
        if (undefined) {
            warp.undefined[slot * LANES + (u32)lane] = undefined;
            warp.tainted[slot] |= 1u << lane;
        } else {
            warp.tainted[slot] &= ~(1u << lane);
        }
    }

    // The lanes of `mask` whose predicate is true; an undefined one is found.
    u32 predicate(Warp &warp, const Instruction &at, u32 slot, u32 mask) {
        if (warp.tainted[slot] & mask) find(warp, at, "an undefined value decides");
        u32 holds = 0;
        for (int lane = 0; lane < LANES; ++lane) holds |= (u32)(value(warp, slot, lane) & 1) << lane;
        return holds & mask;
    }

    // One instruction of one group of lanes that are at the same place.

    void step(Warp &warp) {
        u32 place = 0, group = 0;
        if (!choose(warp, &place, &group)) {
            std::string waiting;
            for (u32 left = warp.live; left;) {
                const int lane = __builtin_ctz(left);
                u32 same = 0;
                for (int other = 0; other < LANES; ++other)
                    if (left >> other & 1 && warp.pc[other] == warp.pc[lane]) same |= 1u << other;
                waiting += format("%slanes %08x at line %u", waiting.empty() ? "" : ", ", same,
                                  kernel_.code[warp.pc[lane]].line);
                left &= ~same;
            }
            stop(warp, kernel_.code[warp.pc[__builtin_ctz(warp.live)]], "lanes wait for ever: " + waiting, End::FAILED);
        }
        const Instruction &at = kernel_.code[place];
        u32 active = group;
        if (at.guarded) {
            active = predicate(warp, at, at.guard, group);
            if (at.negated) active = group & ~active;
        }
        if (++executed_ > MOST_INSTRUCTIONS) stop(warp, at, "the kernel does not end", End::FAILED);
        Profile &profile = *launch_.profile;
        ++profile.instructions;
        profile.lanes += (u64)__builtin_popcount(active);
        if (at.code == Code::BRA) {
            for (int lane = 0; lane < LANES; ++lane)
                if (group >> lane & 1) warp.pc[lane] = active >> lane & 1 ? at.target : place + 1;
            return;
        }
        if (at.code == Code::EXIT) warp.live &= ~active;
        for (int lane = 0; lane < LANES; ++lane)
            if (group >> lane & 1) warp.pc[lane] = place + 1;
        if (active && at.code != Code::EXIT) execute(warp, at, active);
    }

    bool choose(Warp &warp, u32 *place, u32 *group) {
        u32 places[LANES], groups[LANES], count = 0, left = warp.live;
        while (left) {
            const u32 pc = warp.pc[__builtin_ctz(left)];
            u32 same = 0;
            for (int lane = 0; lane < LANES; ++lane) same |= (u32)(warp.pc[lane] == pc) << lane;
            same &= left;
            places[count] = pc;
            groups[count++] = same;
            left &= ~same;
        }
        // A place of an instruction with .sync can be chosen once all lanes are there.
        u32 open[LANES], many = 0, lowest = 0;
        for (u32 i = 0; i < count; ++i)
            if (count == 1 || !kernel_.code[places[i]].sync) {
                if (many && places[i] < places[open[lowest]]) lowest = many;
                open[many++] = i;
            }
        if (!many) return false;
        const u32 chosen = open[launch_.lockstep || many == 1 ? lowest : random_() % many];
        *place = places[chosen];
        *group = groups[chosen];
        return true;
    }

    template <class F>
    static void each(u32 mask, F body) {
        for (int lane = 0; lane < LANES; ++lane)
            if (mask >> lane & 1) body(lane);
    }

    bool tainted(const Warp &warp, const Instruction &at, u32 mask, int sources) const {
        for (int i = 0; i < sources; ++i)
            if (warp.tainted[at.from[i]] & mask) return true;
        return false;
    }

    // Applies an operation of `sources` operands. An undefined bit of an operand makes, by `spread`: all of the result
    // undefined ('a'), the bits from the lowest undefined one up ('u').
    template <class T, class F>
    void apply(Warp &warp, const Instruction &at, u32 mask, int sources, int bits, char spread, F operation) {
        const bool careful = tainted(warp, at, mask, sources);
        const u64 *const a = &warp.values[at.from[0] * LANES];
        const u64 *const b = sources > 1 ? &warp.values[at.from[1] * LANES] : a;
        const u64 *const c = sources > 2 ? &warp.values[at.from[2] * LANES] : a;
        if (!careful) {
            u64 *const to = &warp.values[at.to[0] * LANES];
            each(mask, [&](int lane) { to[lane] = raw(operation(as<T>(a[lane]), as<T>(b[lane]), as<T>(c[lane]))); });
            warp.tainted[at.to[0]] &= ~mask;
            return;
        }
        each(mask, [&](int lane) {
            u64 unknown = 0;
            for (int i = 0; i < sources; ++i) unknown |= undefined(warp, at.from[i], lane) & low_bits(8 * sizeof(T));
            if (unknown) unknown = (spread == 'u' ? ~0ull << __builtin_ctzll(unknown) : ~0ull) & low_bits(bits);
            put(warp, at.to[0], lane, raw(operation(as<T>(a[lane]), as<T>(b[lane]), as<T>(c[lane]))), unknown);
        });
    }

    // Calls `body` with a value of the instruction's type.
    template <class F>
    void typed(Warp &warp, const Instruction &at, Type type, F body) {
        const bool is_signed = type.kind == 's';
        if (type.kind == 'f' && type.bits == 32) return body(float());
        if (type.kind == 'f' && type.bits == 64) return body(double());
        switch (type.bits) {
        case 8: return is_signed ? body(int8_t()) : body(u8());
        case 16: return is_signed ? body(i16()) : body(u16());
        case 32: return is_signed ? body(i32()) : body(u32());
        case 64: return is_signed ? body(i64()) : body(u64());
        default: stop(warp, at, "an unknown type", End::FAILED);
        }
    }

    void execute(Warp &warp, const Instruction &at, u32 mask) {
        switch (at.code) {
        case Code::LD:
        case Code::ST: return at.space == Space::PARAM ? parameter(warp, at, mask) : access(warp, at, mask);
        case Code::ATOM: return atomic(warp, at, mask);
        case Code::SHFL: return shuffle(warp, at, mask);
        case Code::VOTE: return vote(warp, at, mask);
        case Code::BAR: return barrier(warp, at, mask);
        case Code::MEMBAR: return fence(warp);
        case Code::MOV:
        case Code::CVTA:
        case Code::PACK:
        case Code::UNPACK:
        case Code::SELP:
        case Code::AND:
        case Code::OR:
        case Code::XOR:
        case Code::NOT:
        case Code::SHL:
        case Code::SHR:
        case Code::BFI:
        case Code::PRMT: return bitwise(warp, at, mask);
        case Code::SETP: return typed(warp, at, at.type, [&](auto one) { compare<decltype(one)>(warp, at, mask); });
        case Code::CVT: return typed(warp, at, at.source, [&](auto one) { convert<decltype(one)>(warp, at, mask); });
        default: return typed(warp, at, at.type, [&](auto one) { arithmetic<decltype(one)>(warp, at, mask); });
        }
    }

    // Operations that know what becomes of each bit.
    void bitwise(Warp &warp, const Instruction &at, u32 mask) {
        const int bits = at.type.bits;
        const u64 within = low_bits(bits);
        each(mask, [&](int lane) {
            const auto source = [&](int i) { return value(warp, at.from[i], lane); };
            const auto unknown = [&](int i) { return undefined(warp, at.from[i], lane); };
            const u64 a = source(0), ua = unknown(0);
            switch (at.code) {
            case Code::MOV: return put(warp, at.to[0], lane, a & within, ua & within);
            case Code::CVTA: {
                const u64 shift = at.space == Space::SHARED ? SHARED_WINDOW : 0;
                return put(warp, at.to[0], lane, at.to_space ? a - shift : a + shift, ua);
            }
            case Code::PACK: {
                u64 all = 0, all_unknown = 0;
                const int part = bits / (int)at.width;
                for (int i = 0; i < (int)at.width; ++i) {
                    all |= (source(i) & low_bits(part)) << i * part;
                    all_unknown |= (unknown(i) & low_bits(part)) << i * part;
                }
                return put(warp, at.to[0], lane, all, all_unknown);
            }
            case Code::UNPACK: {
                const int part = bits / (int)at.width;
                for (int i = 0; i < (int)at.width; ++i)
                    put(warp, at.to[i], lane, a >> i * part & low_bits(part), ua >> i * part & low_bits(part));
                return;
            }
            case Code::SELP: {
                const bool chosen = source(2) & 1;
                const u64 doubt = unknown(2) & 1 ? within : 0;
                return put(warp, at.to[0], lane, (chosen ? a : source(1)) & within,
                           ((chosen ? ua : unknown(1)) & within) | doubt);
            }
            case Code::NOT: return put(warp, at.to[0], lane, ~a & within, ua & within);
            case Code::AND: {
                const u64 b = source(1), ub = unknown(1);
                // A bit that is known to be zero decides.
                return put(warp, at.to[0], lane, a & b & within, (ua | ub) & (a | ua) & (b | ub) & within);
            }
            case Code::OR: {
                const u64 b = source(1), ub = unknown(1);
                return put(warp, at.to[0], lane, (a | b) & within, (ua | ub) & (~a | ua) & (~b | ub) & within);
            }
            case Code::XOR: return put(warp, at.to[0], lane, (a ^ source(1)) & within, (ua | unknown(1)) & within);
            case Code::SHL:
            case Code::SHR: {
                const u64 by = std::min<u64>(source(1) & 0xffffffff, (u64)bits);
                const bool is_signed = at.type.kind == 's', by_unknown = unknown(1) & 0xffffffff;
                const auto moved = [&](u64 x) {
                    x &= within;
                    if (at.code == Code::SHL) return by >= 64 ? 0 : x << by & within;
                    if (is_signed) return (u64)((i64)(x << (64 - bits)) >> std::min<u64>(by + 64 - (u64)bits, 63)) & within;
                    return by >= 64 ? 0 : x >> by;
                };
                return put(warp, at.to[0], lane, moved(a), by_unknown ? within : moved(ua));
            }
            case Code::BFI: {
                const u64 position = source(2) & 0xff, length = source(3) & 0xff;
                const u64 field = position >= 64 ? 0 : low_bits((int)std::min<u64>(length, 64)) << position & within;
                const u64 doubt = (unknown(2) | unknown(3)) & 0xff ? within : 0;
                const auto inserted = [&](u64 x, u64 y) { return ((position >= 64 ? 0 : x << position) & field) | (y & ~field & within); };
                return put(warp, at.to[0], lane, inserted(a, source(1)), inserted(ua, unknown(1)) | doubt);
            }
            case Code::PRMT: {
                const u64 selector = source(2);
                const auto picked = [&](u64 x, u64 y) {
                    const u64 both = (y << 32) | (x & 0xffffffff);
                    u64 result = 0;
                    for (int i = 0; i < 4; ++i) {
                        const u64 choice = selector >> 4 * i & 15;
                        u64 byte = both >> 8 * (choice & 7) & 0xff;
                        if (choice & 8) byte = byte & 0x80 ? 0xff : 0;
                        result |= byte << 8 * i;
                    }
                    return result;
                };
                return put(warp, at.to[0], lane, picked(a, source(1)), unknown(2) & 0xffff ? within : picked(ua, unknown(1)));
            }
            default: return;
            }
        });
    }

    template <class T>
    void compare(Warp &warp, const Instruction &at, u32 mask) {
        apply<T>(warp, at, mask, 2, 1, 'a', [&](T a, T b, T) -> u8 {
            switch (at.compare) {
            case Compare::EQ: return a == b;
            case Compare::NE: return a < b || a > b;
            case Compare::LT: return a < b;
            case Compare::LE: return a <= b;
            case Compare::GT: return a > b;
            case Compare::GE: return a >= b;
            case Compare::EQU: return !(a < b || a > b);
            case Compare::NEU: return !(a == b);
            case Compare::LTU: return !(a >= b);
            case Compare::LEU: return !(a > b);
            case Compare::GTU: return !(a <= b);
            default: return !(a < b);
            }
        });
    }

    // Conversions. What CUDA leaves open, the integer that NaN becomes, is undefined here.
    template <class T>
    void convert(Warp &warp, const Instruction &at, u32 mask) {
        typed(warp, at, at.type, [&](auto one) {
            using To = decltype(one);
            constexpr bool from_float = std::is_floating_point_v<T>, to_float = std::is_floating_point_v<To>;
            if constexpr (from_float && !to_float) {
                if (!at.toward_zero) stop(warp, at, "an unknown rounding", End::FAILED);
                each(mask, [&](int lane) {
                    const T x = as<T>(value(warp, at.from[0], lane));
                    const bool doubt = undefined(warp, at.from[0], lane) || std::isnan(x);
                    const long double least = (long double)std::numeric_limits<To>::min(), most = (long double)std::numeric_limits<To>::max();
                    const long double whole = std::isnan(x) ? 0 : std::clamp<long double>(std::trunc((long double)x), least, most);
                    put(warp, at.to[0], lane, raw((To)whole), doubt ? ~0ull : 0);
                });
            } else if constexpr (!from_float && !to_float) {
                each(mask, [&](int lane) {
                    // A sign that is undefined makes the bits above undefined.
                    const u64 unknown = undefined(warp, at.from[0], lane) & low_bits(8 * sizeof(T));
                    put(warp, at.to[0], lane, raw((To)as<T>(value(warp, at.from[0], lane))), raw((To)as<T>(unknown)));
                });
            } else {
                apply<T>(warp, at, mask, 1, 64, 'a', [](T x, T, T) { return (To)x; });
            }
        });
    }

    template <class T>
    void arithmetic(Warp &warp, const Instruction &at, u32 mask) {
        const int bits = 8 * (int)sizeof(T);
        if constexpr (std::is_floating_point_v<T>) {
            const auto two = [&](auto f) { apply<T>(warp, at, mask, 2, bits, 'a', f); };
            const auto one = [&](auto f) { apply<T>(warp, at, mask, 1, bits, 'a', f); };
            switch (at.code) {
            case Code::ADD: return two([](T a, T b, T) { return a + b; });
            case Code::SUB: return two([](T a, T b, T) { return a - b; });
            case Code::MUL: return two([](T a, T b, T) { return a * b; });
            case Code::DIV: return two([](T a, T b, T) { return a / b; });
            case Code::MIN: return two([](T a, T b, T) { return std::fmin(a, b); });
            case Code::MAX: return two([](T a, T b, T) { return std::fmax(a, b); });
            case Code::RCP: return one([](T a, T, T) { return T(1) / a; });
            case Code::NEG: return one([](T a, T, T) { return -a; });
            case Code::ABS: return one([](T a, T, T) { return std::fabs(a); });
            default: break;
            }
        } else {
            using U = std::make_unsigned_t<T>;
            using Wide = std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>;
            const auto two = [&](char spread, auto f) { apply<T>(warp, at, mask, 2, bits, spread, f); };
            const auto one = [&](auto f) { apply<T>(warp, at, mask, 1, bits, 'a', f); };
            switch (at.code) {
            case Code::ADD: return two('u', [](T a, T b, T) { return (T)((U)a + (U)b); });
            case Code::SUB: return two('u', [](T a, T b, T) { return (T)((U)a - (U)b); });
            case Code::MUL:
            case Code::MAD: {
                const int sources = at.code == Code::MAD ? 3 : 2;
                const bool add = at.code == Code::MAD;
                if (at.part == Part::WIDE) {
                    if (add) break;
                    return apply<T>(warp, at, mask, 2, 2 * bits, 'a', [](T a, T b, T) { return (u64)((Wide)a * (Wide)b); });
                }
                const bool high = at.part == Part::HIGH;
                return apply<T>(warp, at, mask, sources, bits, high ? 'a' : 'u', [add, high](T a, T b, T c) {
                    const unsigned __int128 product = (unsigned __int128)((Wide)a * (Wide)b);
                    return (T)((U)(high ? product >> 8 * sizeof(T) : product) + (add ? (U)c : (U)0));
                });
            }
            case Code::DIV:
            case Code::REM: {
                const bool divide = at.code == Code::DIV;
                each(mask, [&](int lane) {
                    if (as<T>(value(warp, at.from[1], lane)) == 0) find(warp, at, "a division by zero");
                });
                return two('a', [divide](T a, T b, T) -> T {
                    if (b == 0) return (T)~(U)0;
                    if (std::is_signed_v<T> && b == (T)-1) return divide ? (T)((U)0 - (U)a) : (T)0;
                    return divide ? (T)(a / b) : (T)(a % b);
                });
            }
            case Code::MIN: return two('a', [](T a, T b, T) { return std::min(a, b); });
            case Code::MAX: return two('a', [](T a, T b, T) { return std::max(a, b); });
            case Code::NEG: return one([](T a, T, T) { return (T)((U)0 - (U)a); });
            case Code::ABS: return one([](T a, T, T) { return a < 0 ? (T)((U)0 - (U)a) : a; });
            case Code::POPC: return one([](T a, T, T) { return (u32)__builtin_popcountll((U)a); });
            case Code::CLZ:
                return one([](T a, T, T) { return (u32)((U)a ? __builtin_clzll((U)a) - (64 - 8 * (int)sizeof(T)) : 8 * (int)sizeof(T)); });
            default: break;
            }
        }
        stop(warp, at, "an instruction that the interpreter does not know", End::FAILED);
    }

    // Lanes that meet.

    void meet(const Warp &warp, const Instruction &at, u32 slot, u32 mask) {
        each(mask, [&](int lane) {
            const u32 named = (u32)value(warp, slot, lane);
            if (named != ALL || mask != ALL)
                stop(warp, at, format("lanes %08x are here, and the instruction names %08x", mask, named), End::FAILED);
        });
    }

    void shuffle(Warp &warp, const Instruction &at, u32 mask) {
        meet(warp, at, at.from[3], mask);
        ++launch_.profile->shuffles;
        u64 values[LANES], unknown[LANES], result[LANES], result_unknown[LANES], within[LANES];
        for (int lane = 0; lane < LANES; ++lane) {
            values[lane] = value(warp, at.from[0], lane) & 0xffffffff;
            unknown[lane] = undefined(warp, at.from[0], lane) & 0xffffffff;
        }
        if ((warp.tainted[at.from[1]] | warp.tainted[at.from[2]]) & mask) find(warp, at, "an undefined value says from which lane");
        for (int lane = 0; lane < LANES; ++lane) {
            const int by = (int)(value(warp, at.from[1], lane) & 31), control = (int)value(warp, at.from[2], lane);
            const int segment = control >> 8 & 31, clamp = control & 31;
            const int most = (lane & segment) | (clamp & ~segment), least = lane & segment;
            int from = lane;
            bool inside = true;
            switch (at.shuffle) {
            case Shuffle::UP: from = lane - by, inside = from >= most; break;
            case Shuffle::DOWN: from = lane + by, inside = from <= most; break;
            case Shuffle::BFLY: from = lane ^ by, inside = from <= most; break;
            case Shuffle::IDX: from = least | (by & ~segment), inside = from <= most; break;
            }
            if (!inside) from = lane;
            result[lane] = values[from];
            result_unknown[lane] = unknown[from];
            within[lane] = inside;
        }
        for (int lane = 0; lane < LANES; ++lane) {
            put(warp, at.to[0], lane, result[lane], result_unknown[lane]);
            put(warp, at.to[1], lane, within[lane], 0);
        }
    }

    void vote(Warp &warp, const Instruction &at, u32 mask) {
        meet(warp, at, at.from[1], mask);
        u64 ballot = 0, unknown = 0;
        for (int lane = 0; lane < LANES; ++lane) {
            ballot |= (value(warp, at.from[0], lane) & 1) << lane;
            unknown |= (undefined(warp, at.from[0], lane) & 1) << lane;
        }
        for (int lane = 0; lane < LANES; ++lane) put(warp, at.to[0], lane, ballot, unknown);
    }

    void barrier(Warp &warp, const Instruction &at, u32 mask) {
        if (at.of_warp) {
            meet(warp, at, at.from[0], mask);
            warp.met = ++warp.now;
        } else {
            if (mask != ALL) stop(warp, at, format("only lanes %08x are at a barrier of the block", mask), End::FAILED);
            warp.waits = true;
            let_pass(*warp.block);
        }
    }

    // Once all warps of a block wait, each goes on and sees what they have done.
    void let_pass(Block &block) {
        for (const auto &one : block.warps)
            if (!one->waits) return;
        std::vector<u32> seen((size_t)launch_.blocks * warps_per_block_, 0);
        for (const auto &one : block.warps) {
            for (size_t i = 0; i < seen.size(); ++i) seen[i] = std::max(seen[i], one->seen[i]);
            seen[one->index] = one->now;
        }
        for (const auto &one : block.warps) {
            one->seen = seen;
            one->met = ++one->now;
            one->waits = false;
        }
    }

    // What was done before a fence is released by an atomic behind it; what an atomic has found is seen behind the next.
    void fence(Warp &warp) {
        for (size_t i = 0; i < warp.seen.size(); ++i) warp.seen[i] = std::max(warp.seen[i], warp.arriving[i]);
        warp.released = warp.seen;
        warp.released[warp.index] = warp.now++;
        warp.releasing = true;
    }

    // Memory.

    void parameter(Warp &warp, const Instruction &at, u32 mask) {
        const u64 bits = launch_.arguments.at(at.from[0]) & low_bits(at.type.bits);
        each(mask, [&](int lane) { put(warp, at.to[0], lane, bits, 0); });
    }

    bool ordered(const Warp &warp, int lane, u32 thread, u32 time) const {
        const u32 other = (thread - 1) / LANES;
        if (other == warp.index) return thread == warp.index * LANES + (u32)lane + 1 || time < warp.met;
        return other < warp.seen.size() && time <= warp.seen[other];
    }

    // Checks an access of a byte against those before it, and remembers it. Two lanes may write the same value.
    const char *race(Warp &warp, int lane, Cell &cell, bool write, bool atomic, bool same) const {
        const char *found = nullptr;
        const u32 thread = warp.index * LANES + (u32)lane + 1;
        if (cell.writer && !(atomic && cell.atomic) && !(write && same) && !ordered(warp, lane, cell.writer, cell.written))
            found = write ? "writes what another thread writes" : "reads what another thread writes";
        if (write && !atomic && !same && cell.reader_warp) {
            bool safe;
            if (cell.reader_warp == MANY) {
                safe = !warp.seen.empty();
                for (size_t i = 0; safe && i < warp.seen.size(); ++i) safe = i == warp.index || warp.seen[i];
            } else if (cell.reader_warp - 1 == warp.index) {
                safe = cell.read < warp.met || !(cell.readers & ~(1u << lane));
            } else {
                safe = cell.reader_warp - 1 < warp.seen.size() && cell.read <= warp.seen[cell.reader_warp - 1];
            }
            if (!safe) found = "writes what another thread reads";
        }
        if (write) {
            cell.writer = thread;
            cell.written = warp.now;
            cell.atomic = atomic;
            if (!atomic) cell.reader_warp = cell.readers = 0;
        } else if (cell.reader_warp == warp.index + 1) {
            cell.readers = cell.read < warp.met ? 1u << lane : cell.readers | 1u << lane;
            cell.read = warp.now;
        } else {
            cell.reader_warp = cell.reader_warp ? MANY : warp.index + 1;
            cell.readers = 1u << lane;
            cell.read = warp.now;
        }
        return found;
    }

    Cell *cells_of(u64 address) {
        const u64 page = address / BLOCK_OF_CELLS;
        if (page != last_page_) {
            auto &cells = cells_[page];
            if (!cells) cells = std::make_unique<Cell[]>(BLOCK_OF_CELLS);
            last_cells_ = cells.get();
            last_page_ = page;
        }
        return last_cells_ + address % BLOCK_OF_CELLS;
    }

    struct Place {
        u64 address;
        u8 *bytes;
        bool shared;
    };

    Place place(Warp &warp, const Instruction &at, int lane, u64 nbytes, bool write) {
        if (undefined(warp, at.from[0], lane)) find(warp, at, "an address is undefined");
        u64 address = value(warp, at.from[0], lane) + (u64)at.offset;
        bool shared = at.space == Space::SHARED;
        if (shared) address &= 0xffffffff;
        if (at.space == Space::GENERIC && address - SHARED_WINDOW < SHARED_BYTES) {
            shared = true;
            address -= SHARED_WINDOW;
        }
        const char *const verb = write ? "writes" : "reads";
        if (shared) {
            auto &memory = warp.block->shared;
            if (address + nbytes > memory.size())
                stop(warp, at, format("lane %d %s byte %llu of %zu of shared memory", lane, verb, (unsigned long long)address, memory.size()), End::ILLEGAL_ADDRESS);
            if (address % nbytes) misaligned(warp, at, lane, address, nbytes);
            return {address, memory.data() + address, true};
        }
        const Program &program = *launch_.program;
        if (address - program.base() < program.nbytes() && nbytes <= program.base() + program.nbytes() - address && !write) {
            if (address % nbytes) misaligned(warp, at, lane, address, nbytes);
            return {address, (u8 *)address, false};
        }
        if (address < last_span_.start || address + nbytes > last_span_.end) {
            if (!launch_.resolve(address, &last_span_) || address + nbytes > last_span_.end) {
                const u64 start = last_span_.start, end = last_span_.end;
                last_span_ = {};
                stop(warp, at,
                     address >= start && address < end
                         ? format("lane %d %s %llu bytes %llu before the end of an allocation", lane, verb, (unsigned long long)nbytes, (unsigned long long)(end - address))
                         : format("lane %d %s %llu bytes at %#llx, which is no memory of this GPU", lane, verb, (unsigned long long)nbytes, (unsigned long long)address),
                     End::ILLEGAL_ADDRESS);
            }
        }
        if (address % nbytes) misaligned(warp, at, lane, address, nbytes);
        launch_.accessed(address, nbytes, write);
        return {address, (u8 *)(address + (u64)last_span_.shift), false};
    }

    [[noreturn]] void misaligned(Warp &warp, const Instruction &at, int lane, u64 address, u64 nbytes) const {
        stop(warp, at, format("lane %d accesses %llu bytes at %#llx, which is not aligned", lane, (unsigned long long)nbytes, (unsigned long long)address), End::MISALIGNED);
    }

    // Marks an access in the bytes' cells; finds a race.
    void mark(Warp &warp, const Instruction &at, int lane, const Place &place, u64 nbytes, bool write, bool atomic, u64 same_bytes) {
        const char *found = nullptr;
        for (u64 i = 0; i < nbytes; ++i) {
            Cell &cell = place.shared ? warp.block->cells[place.address + i] : *cells_of(place.address + i);
            if (!place.shared && (atomic || cell.atomic) && !among_atomics(warp, place.address + i, write, atomic))
                found = write ? "writes what another thread writes" : "reads what another thread writes";
            if (const char *what = race(warp, lane, cell, write, atomic, same_bytes >> i & 1)) found = what;
        }
        if (found) find(warp, at, format("a race in %s memory: lane %d %s", place.shared ? "shared" : "global", lane, found));
    }

    // Remembers the atomics of all warps on a byte, not of the last one alone; returns false if an access that is not
    // atomic comes behind one that nothing orders before it.
    bool among_atomics(const Warp &warp, u64 address, bool write, bool atomic) {
        auto &changes = atomics_[address / 4];
        if (atomic) {
            // The first one behind a fence releases what was before the fence, and is seen with that.
            if (write) changes[warp.index] = warp.releasing ? warp.released[warp.index] : warp.now;
            return true;
        }
        for (const auto &[other, time] : changes)
            if (other != warp.index && (other >= warp.seen.size() || time > warp.seen[other])) return false;
        if (write) changes.clear();
        return true;
    }

    bool constant(const Place &place) const {
        return !place.shared && place.address - launch_.program->base() < launch_.program->nbytes();
    }

    void access(Warp &warp, const Instruction &at, u32 mask) {
        const bool write = at.code == Code::ST;
        const u64 size = at.type.bits / 8, nbytes = size * at.width;
        u64 addresses[LANES];
        int count = 0, shared = 0;
        each(mask, [&](int lane) {
            const Place here = place(warp, at, lane, nbytes, write);
            u64 same = 0;
            u8 *const doubt = here.shared ? &warp.block->undefined[here.address] : nullptr;
            for (u32 i = 0; i < at.width; ++i) {
                u8 *const bytes = here.bytes + i * size;
                if (write) {
                    const u64 bits = value(warp, at.to[i], lane), unknown = undefined(warp, at.to[i], lane) & low_bits(at.type.bits);
                    if (unknown && !here.shared) find(warp, at, format("lane %d writes an undefined value", lane));
                    for (u64 k = 0; k < size; ++k) {
                        const u8 byte = (u8)(bits >> 8 * k);
                        same |= (u64)(bytes[k] == byte) << (i * size + k);
                        bytes[k] = byte;
                        if (doubt) doubt[i * size + k] = (u8)(unknown >> 8 * k);
                    }
                } else {
                    u64 bits = 0, unknown = 0;
                    memcpy(&bits, bytes, size);
                    if (doubt) memcpy(&unknown, doubt + i * size, size);
                    if (at.type.kind == 's' && size < 8) {
                        const int shift = 64 - at.type.bits;
                        bits = (u64)((i64)(bits << shift) >> shift);
                        unknown = (u64)((i64)(unknown << shift) >> shift);
                    }
                    put(warp, at.to[i], lane, bits, unknown);
                }
            }
            if (!constant(here)) mark(warp, at, lane, here, nbytes, write, at.strong, same);
            addresses[count++] = here.address;
            shared += here.shared;
        });
        Profile &profile = *launch_.profile;
        if (shared) {
            ++profile.shared;
            profile.shared_cycles += cycles(addresses, count, nbytes);
            return;
        }
        const u64 touched = sectors(addresses, count, nbytes);
        (write ? profile.stores : profile.loads) += 1;
        (write ? profile.store_bytes : profile.load_bytes) += (u64)count * nbytes;
        (write ? profile.store_sectors : profile.load_sectors) += touched;
    }

    static u64 sectors(const u64 *addresses, int count, u64 nbytes) {
        u64 found[LANES];
        for (int i = 0; i < count; ++i) found[i] = addresses[i] / 32;
        (void)nbytes;  // accesses are aligned: each lies in one sector
        std::sort(found, found + count);
        return (u64)(std::unique(found, found + count) - found);
    }

    // How often the most wanted of 32 banks is accessed, by different words.
    static u64 cycles(const u64 *addresses, int count, u64 nbytes) {
        std::vector<u64> words;
        for (int i = 0; i < count; ++i)
            for (u64 at = addresses[i] / 4; at <= (addresses[i] + nbytes - 1) / 4; ++at) words.push_back(at);
        std::sort(words.begin(), words.end());
        words.erase(std::unique(words.begin(), words.end()), words.end());
        u64 banks[32] = {}, most = 0;
        for (const u64 word : words) most = std::max(most, ++banks[word % 32]);
        return most;
    }

    void atomic(Warp &warp, const Instruction &at, u32 mask) {
        const u64 size = at.type.bits / 8;
        const bool add = at.compare != Compare::NE;
        ++launch_.profile->atomics;
        int order[LANES], count = 0;
        each(mask, [&](int lane) { order[count++] = lane; });
        if (!launch_.lockstep) std::shuffle(order, order + count, random_);
        for (int k = 0; k < count; ++k) {
            const int lane = order[k];
            const Place here = place(warp, at, lane, size, true);
            const u64 operand = value(warp, at.from[1], lane), unknown = undefined(warp, at.from[1], lane) & low_bits(at.type.bits);
            u64 before = 0, doubt = 0;
            memcpy(&before, here.bytes, size);
            const u64 after = add ? before + operand : before | operand;
            memcpy(here.bytes, &after, size);
            if (here.shared) {
                u8 *const marks = &warp.block->undefined[here.address];
                memcpy(&doubt, marks, size);
                if (doubt) find(warp, at, format("lane %d changes shared memory that was not written", lane));
                memset(marks, 0, size);
            }
            if (unknown) find(warp, at, format("lane %d adds an undefined value", lane));
            mark(warp, at, lane, here, size, true, true, 0);
            put(warp, at.to[0], lane, before, 0);
            if (kernel_.fences && !here.shared) {
                auto &clock = released_[here.address];
                clock.resize(warp.seen.size());
                for (size_t i = 0; i < clock.size(); ++i) {
                    warp.arriving[i] = std::max(warp.arriving[i], clock[i]);
                    if (!warp.released.empty()) clock[i] = std::max(clock[i], warp.released[i]);
                }
            }
        }
        warp.releasing = false;
    }
};

}  // namespace

End run(Launch &launch) {
    try {
        Grid(launch).run();
    } catch (const Stop &stopped) {
        return stopped.end;
    }
    return End::DONE;
}

}  // namespace simcuda::ptx
