// Lossless: the exponents of floats are entropy-coded, signs and mantissas are stored raw.
//
// Exponents of real data are few and unevenly distributed; the mantissas are noise. The coder is rANS with 32 interleaved states,
// one per lane, 16-bit output words, and one table of frequencies (out of 4096) for the whole stream.
//
// Stream: a stream of tiles (tiles.h). Tile 0 is the frequency table: first exponent and number of exponents (u16 each), then a u16
// for each. Every other tile is up to 4096 values in groups of 32: the 32 states (u32 each), the groups' raw bits, the words. The initial states are 16 raw bits each, so the first 64 raw bytes are not
// stored again. The encoder walks the groups forwards, the decoder backwards, and its final states are those 64 bytes.
#include "reduce.h"
#include "split_layout.h"
#include "tiles.h"

constexpr u32 SCALE_BITS = 12, SCALE = 1 << SCALE_BITS;
constexpr u32 LOWEST_STATE = 1u << 15, SEED = 1u << 16;

// Coding an exponent: x -> x / frequency * SCALE + x % frequency + start, with a multiplication instead of the division.
struct EncodeTable {
    u32 *reciprocal, *rest;  // rest: bits 0-12 the addend, 13-16 the shift, 17-29 the frequency

    MEMBER void set(u32 symbol, u32 frequency, u32 start) {
        u32 shift = 0;
        while (frequency > 1u << shift) ++shift;
        if (frequency > 1) {
            reciprocal[symbol] = (u32)((((u64)1 << (shift + 31)) + frequency - 1) / frequency);
            rest[symbol] = start | (shift - 1) << 13 | frequency << 17;
        } else {  // x / 1 yields x - 1, which the addend SCALE - 1 compensates
            reciprocal[symbol] = ~0u;
            rest[symbol] = (start + SCALE - 1) | frequency << 17;
        }
    }

    MEMBER void look_up(const Lane<u32> &exponent, Lane<u32> &reciprocal_of, Lane<u32> &rest_of) const {
        FOR_LANES(l) {
            reciprocal_of[l] = reciprocal[exponent[l]];
            rest_of[l] = rest[exponent[l]];
        }
    }
};

// Decoding: the exponent of each of the SCALE slots, its frequency minus one, and the slot's index among the exponent's.
template <class T>
struct DecodeSlot {
    typedef typename Select<(Parts<T>::SYMBOLS > 256), u64, u32>::type Entry;
    static constexpr int SYMBOL_BITS = Parts<T>::SYMBOLS > 256 ? 16 : 8;

    static MEMBER Entry make(u32 symbol, u32 frequency, u32 place) {
        return symbol | (Entry)(frequency - 1) << SYMBOL_BITS | (Entry)place << (SYMBOL_BITS + SCALE_BITS);
    }
    static MEMBER u32 symbol(Entry e) { return (u32)e & ((1u << SYMBOL_BITS) - 1); }
    static MEMBER u32 frequency(Entry e) { return ((u32)(e >> SYMBOL_BITS) & (SCALE - 1)) + 1; }
    static MEMBER u32 place(Entry e) { return (u32)(e >> (SYMBOL_BITS + SCALE_BITS)); }
};

template <class T>
DEVICE constexpr int counter_copies() {  // equal neighbours are counted in different copies
    return Parts<T>::SYMBOLS > 256 ? 1 : COUNTER_COPIES;
}

// Counts the exponents of this warp's tiles, then adds them to the counts of all; returns the number of its tiles.
template <class T>
DEVICE u64 count_exponents(i64 first, i64 last, const typename Layout<T>::U *from, i64 count, u32 *local, u32 *counts) {
    constexpr int N = Parts<T>::SYMBOLS, COPIES = counter_copies<T>();
    u64 tiles = 0;
    for (int i = 0; i < N * COPIES; i += LANES) FOR_LANES(l) local[i + l] = 0;
    warp_sync();
    FOR_TILES(t) {
        ++tiles;
        const i64 end = (t + 1) * Parts<T>::TILE < count ? (t + 1) * Parts<T>::TILE : count;
        for (i64 at = t * Parts<T>::TILE; at < end; at += LANES) {
            if (at + LANES <= end) {
                FOR_LANES_IN_TURN(l) warp_atomic_add(local + l % COPIES * N + Parts<T>::exponent(from[at + l]), 1);
            } else {
                FOR_LANES_IN_TURN(l) if (at + l < end) warp_atomic_add(local + Parts<T>::exponent(from[at + l]), 1);
            }
        }
    }
    warp_sync();
    for (int i = 0; i < N; i += LANES) {
        FOR_LANES_IN_TURN(l) {
            u32 sum = 0;
            UNROLL for (int c = 0; c < COPIES; ++c) sum += local[c * N + i + l];
            if (sum) atomic_add(counts + i + l, sum);
        }
    }
    return tiles;
}

// Makes the frequencies add up to SCALE by changing the largest; none that is not zero becomes zero.
DEVICE void balance(u32 *frequency, int symbols, u32 sum) {
    while (sum != SCALE) {
        Lane<u32> key;  // the first of the largest has the largest key
        FOR_LANES(l) key[l] = 0;
        for (int i = 0; i < symbols; i += LANES) {
            FOR_LANES(l) {
                const u32 one = frequency[i + l] << 12 | (u32)(symbols - 1 - i - l);
                key[l] = one > key[l] ? one : key[l];
            }
        }
        const u32 found = reduce_max(key), largest = (u32)symbols - 1 - (found & (SCALE - 1)), half = found >> 13;
        const u32 change = sum < SCALE ? SCALE - sum : sum - SCALE < half ? SCALE - sum : 0 - half;
        warp_sync();
        ONE_LANE frequency[largest] += change;
        warp_sync();
        sum += change;
    }
}

// Converts counts to frequencies, writes them as tile 0 and builds the encoder's table.
template <class T>
DEVICE void make_tables(const u32 *counts, i64 count, u32 *frequency, u8 *slots, u32 *sizes, u64 *starts, EncodeTable table) {
    constexpr int N = Parts<T>::SYMBOLS;
    Lane<u32> sum;
    FOR_LANES(l) sum[l] = 0;
    for (int i = 0; i < N; i += LANES) {
        FOR_LANES(l) {
            const u64 seen = counts[i + l];
            const u32 rounded = (u32)((seen * SCALE + (u64)count / 2) / (u64)count);
            frequency[i + l] = seen && !rounded ? 1 : rounded;
            sum[l] += frequency[i + l];
        }
    }
    warp_sync();
    balance(frequency, N, reduce_sum(sum));
    Lane<u32> above, from_top;  // the largest symbol plus 1, and N minus the smallest
    FOR_LANES(l) above[l] = from_top[l] = 0;
    for (int i = 0; i < N; i += LANES) {
        FOR_LANES(l) {
            const u32 symbol = (u32)(i + l);
            above[l] = frequency[symbol] ? symbol + 1 : above[l];
            from_top[l] = frequency[symbol] && !from_top[l] ? N - symbol : from_top[l];
        }
    }
    const u32 low = N - reduce_max(from_top), high = reduce_max(above), symbols = high - low;
    u16 *const out = (u16 *)slots;
    u32 start = 0;
    for (u32 i = low; i < high; i += LANES) {
        Lane<u32> own;
        FOR_LANES(l) own[l] = i + l < high ? frequency[i + l] : 0;
        const Lane<u32> ends = scan_inclusive(own);
        FOR_LANES(l) {
            if (i + l < high) {
                table.set(i + l, own[l], start + ends[l] - own[l]);
                out[2 + i - low + l] = (u16)own[l];
            }
        }
        start += broadcast(ends, LANES - 1);
    }
    ONE_LANE {
        out[0] = (u16)low, out[1] = (u16)symbols;
        if (symbols % 2) out[2 + symbols] = 0;
        sizes[0] = 4 + (symbols + 1) / 2 * 4;
        starts[0] = 0;
    }
}

// The last warp makes the tables from the counts of all. `counts` and *done are zero at launch.
template <class T>
DEVICE void make_table_of(i64 first, i64 last, const typename Layout<T>::U *from, i64 count, u32 *counts, u64 *done, u8 *slots, u32 *sizes,
                  u64 *starts, EncodeTable table) {
    WARP_SHARED(u32, local, Parts<T>::SYMBOLS * counter_copies<T>());
    const u64 tiles = count_exponents<T>(first, last, from, count, local, counts);
    if (!last_warp(done, tiles, (u64)((count + Parts<T>::TILE - 1) / Parts<T>::TILE))) return;
    make_tables<T>(counts, count, local, slots, sizes, starts, table);
}

// Reads the exponents and raw bits of a group; the last group is padded with its first value.
template <class T>
DEVICE void load_group(const typename Layout<T>::U *from, i64 at, i64 count, Lane<u32> &exponent,
                       Lane<typename Layout<T>::U> &raw) {
    if (at + LANES <= count) {
        FOR_LANES(l) {
            exponent[l] = Parts<T>::exponent(from[at + l]);
            raw[l] = Parts<T>::raw(from[at + l]);
        }
    } else {
        FOR_LANES(l) {
            const typename Layout<T>::U bits = from[at + l < count ? at + l : at];
            exponent[l] = Parts<T>::exponent(bits);
            raw[l] = Parts<T>::raw(bits);
        }
    }
}

// The encoder's table if all exponents fit: one entry per lane, so that a lookup is a shuffle.
struct LaneTable {
    Lane<u32> reciprocal, rest;
    u32 low;

    MEMBER LaneTable(const EncodeTable &table, u32 low, u32 symbols) : low(low) {
        FOR_LANES(l) {
            reciprocal[l] = (u32)l < symbols ? table.reciprocal[low + l] : 0;
            rest[l] = (u32)l < symbols ? table.rest[low + l] : 0;
        }
    }

    MEMBER void look_up(const Lane<u32> &exponent, Lane<u32> &reciprocal_of, Lane<u32> &rest_of) const {
        Lane<int> place;
        FOR_LANES(l) place[l] = (int)(exponent[l] - low);
        reciprocal_of = shuffle(reciprocal, place);
        rest_of = shuffle(rest, place);
    }
};

// Encodes 32 exponents; writes the words that overflow the states, and returns their number.
template <class Table>
DEVICE int encode_group(const Lane<u32> &exponent, const Table &table, Lane<u32> &state, u16 *words) {
    Lane<u32> reciprocal, rest, full;
    table.look_up(exponent, reciprocal, rest);
    FOR_LANES(l) full[l] = state[l] >= (rest[l] >> 17) << (31 - SCALE_BITS);
    const u32 map = ballot(full);
    store_halves(map, state, words);
    FOR_LANES(l) {
        const u32 x = full[l] ? state[l] >> 16 : state[l];
        const u32 quotient = (u32)((u64)x * reciprocal[l] >> 32) >> (rest[l] >> 13 & 15);
        state[l] = x + (rest[l] & 0x1fff) + quotient * (SCALE - (rest[l] >> 17));
    }
    return count_ones(map);
}

template <class T, class Table>
DEVICE u32 encode_tile(const typename Layout<T>::U *from, i64 start, i64 count, bool last, const Table &table, u8 *out) {
    constexpr int RAW = Parts<T>::RAW_BYTES, SEEDED = Parts<T>::SEEDED_GROUPS, AT_ONCE = Parts<T>::AT_ONCE;
    const int groups = (int)((count - start < Parts<T>::TILE ? count - start + LANES - 1 : Parts<T>::TILE) / LANES);
    u8 *const raw_at = out + STATE_BYTES - SEED_BYTES;
    Lane<u32> state, exponent;
    Lane<typename Layout<T>::U> raw;
    FOR_LANES(l) ((u16 *)raw_at)[l] = 0;
    warp_sync();
    for (int g = 0; g < SEEDED && g < groups; ++g) {
        load_group<T>(from, start + g * LANES, count, exponent, raw);
        store_raw<T>(raw, raw_at + g * RAW);
    }
    warp_sync();
    FOR_LANES(l) state[l] = SEED | ((const u16 *)raw_at)[l];
    u16 *const words = (u16 *)(raw_at + raw_bytes<T>(groups)), *word = words;
    for (int g = 0; g < groups; g += AT_ONCE) {
        Lane<u32> exponents[AT_ONCE];
        Lane<typename Layout<T>::U> raws[AT_ONCE];
        UNROLL for (int i = 0; i < AT_ONCE; ++i)
            if (g + i < groups) load_group<T>(from, start + (g + i) * LANES, count, exponents[i], raws[i]);
        UNROLL for (int i = 0; i < AT_ONCE; ++i) {
            if (g + i >= groups) break;
            if (g + i >= SEEDED) store_raw<T>(raws[i], raw_at + (g + i) * RAW);
            word += encode_group(exponents[i], table, state, word);
        }
    }
    const u32 odd = (word - words) & 1;
    warp_sync();  // the last of these words are the seeds, which all lanes have read
    FOR_LANES(l) ((u32 *)out)[l] = state[l] | (l == 0 ? odd << 31 : 0);
    ONE_LANE {
        if (odd) *word = 0;
    }
    word += odd;
    if (last) {
        FOR_LANES(l) ((u8 *)word)[l] = 0;
        word += SLACK / 2;
    }
    return (u32)((u8 *)word - out);
}

template <class T>
DEVICE void encode(i64 first, i64 last, const typename Layout<T>::U *from, i64 count, const EncodeTable &table, u8 *slots,
                   u32 *sizes, u64 *starts) {
    constexpr i64 TILE = Parts<T>::TILE;
    TileWriter writer(slots, Parts<T>::SLOT, first, sizes + 1, starts + 1, sizes[0]);
    const u32 low = ((const u16 *)slots)[0], symbols = ((const u16 *)slots)[1];
    const LaneTable in_lanes(table, low, symbols);
    FOR_TILES(t) {
        const bool is_last = (t + 1) * TILE >= count;
        u8 *out = writer.begin(t);
        writer.end(t, symbols <= LANES ? encode_tile<T>(from, t * TILE, count, is_last, in_lanes, out)
                                       : encode_tile<T>(from, t * TILE, count, is_last, table, out));
    }
}

// Decodes 32 exponents. Returns false if there are not enough words.
template <class T>
DEVICE bool decode_group(const typename DecodeSlot<T>::Entry *slots, Lane<u32> &state, const u16 *words, i64 &left,
                         Lane<u32> &exponent) {
    typedef DecodeSlot<T> Slot;
    Lane<u32> low;
    FOR_LANES(l) {
        const typename Slot::Entry entry = slots[state[l] & (SCALE - 1)];
        exponent[l] = Slot::symbol(entry);
        state[l] = Slot::frequency(entry) * (state[l] >> SCALE_BITS) + Slot::place(entry);
        low[l] = state[l] < LOWEST_STATE;
    }
    const u32 map = ballot(low);
    left -= count_ones(map);
    if (left < 0) return false;
    const Lane<u32> word = load_halves(map, words + left);
    FOR_LANES(l) state[l] = low[l] ? state[l] << 16 | word[l] : state[l];
    return true;
}

template <class T>
DEVICE void store_group(const Lane<u32> &exponent, const Lane<typename Layout<T>::U> &raw, T *to, i64 start, i64 count, i64 op) {
    Lane<T> value[1];
    FOR_LANES(l) value[0][l] = value_of(Parts<T>::join(exponent[l], raw[l]), T());
    store_lanes(to, start, count, value, op);
}

// Decodes one tile; fails if its words do not add up to `size` bytes.
template <class T>
DEVICE bool decode_tile(const u8 *in, i64 size, const typename DecodeSlot<T>::Entry *slots, T *to, i64 start, i64 count, i64 op) {
    constexpr int RAW = Parts<T>::RAW_BYTES, SEEDED = Parts<T>::SEEDED_GROUPS, AT_ONCE = Parts<T>::AT_ONCE;
    const int groups = (int)((count - start < Parts<T>::TILE ? count - start + LANES - 1 : Parts<T>::TILE) / LANES);
    const i64 before_words = STATE_BYTES - SEED_BYTES + raw_bytes<T>(groups);
    if (size < before_words) return false;
    const u8 *raw_at = in + STATE_BYTES - SEED_BYTES;
    const u16 *words = (const u16 *)(in + before_words);
    Lane<u32> state, exponent, seeded[2];
    FOR_LANES(l) {
        state[l] = ((const u32 *)in)[l] & 0x7fffffffu;
        seeded[0][l] = seeded[1][l] = 0;
    }
    i64 left = (size - before_words) / 2 - (*(const u32 *)in >> 31);
    for (int end = groups; end > 0; end -= AT_ONCE) {
        Lane<typename Layout<T>::U> raws[AT_ONCE];
        UNROLL for (int i = 0; i < AT_ONCE; ++i)
            if (end - 1 - i >= SEEDED) load_raw<T>(raw_at + (end - 1 - i) * RAW, raws[i]);
        UNROLL for (int i = 0; i < AT_ONCE; ++i) {
            const int g = end - 1 - i;
            if (g < 0) break;
            if (!decode_group<T>(slots, state, words, left, exponent)) return false;
            if (g >= SEEDED)
                store_group(exponent, raws[i], to, start + g * LANES, count, op);
            else if (g)
                seeded[1] = exponent;
            else
                seeded[0] = exponent;
        }
    }
    // The states are back at their initial values: the first raw bytes, which the first groups need.
    WARP_SHARED(u32, raw, SEEDED * RAW / 4);
    Lane<u32> wrong;
    for (int i = 0; i < SEEDED * RAW / 4; i += LANES)
        FOR_LANES(l) if (i + l < SEEDED * RAW / 4 && i + l < groups * RAW / 4) raw[i + l] = ((const u32 *)raw_at)[i + l];
    warp_sync();
    FOR_LANES(l) {
        if (2 * l < SEEDED * RAW) ((u16 *)raw)[l] = (u16)state[l];
        wrong[l] = state[l] >> 16 != SEED >> 16;
    }
    warp_sync();
    UNROLL for (int g = 0; g < SEEDED; ++g) {
        if (g < groups) {
            Lane<typename Layout<T>::U> bits;
            load_raw<T>((const u8 *)raw + g * RAW, bits);
            store_group(seeded[g], bits, to, start + g * LANES, count, op);
        }
    }
    warp_sync();
    return left == 0 && reduce_or(wrong) == 0;
}

// Reads tile 0, validates it and fills the decoder's slots: each warp of a block those of its share of the exponents.
template <class T>
DEVICE bool open_table(const u8 *in, u64 size, typename DecodeSlot<T>::Entry *slots) {
    const u16 *table = (const u16 *)in;
    const u32 low = table[0], symbols = table[1];
    if (low + symbols > (u32)Parts<T>::SYMBOLS || size != 4 + (u64)(symbols + 1) / 2 * 4) return false;
    u32 start = 0;
    for (u32 s = 0; s < symbols; ++s) {
        const u32 frequency = table[2 + s];
        if (frequency > SCALE - start) return false;
        if (s % WARPS_PER_BLOCK == (u32)warp_of_block()) {
            for (u32 i = 0; i < frequency; i += LANES)
                FOR_LANES(l) if (i + l < frequency) slots[start + i + l] = DecodeSlot<T>::make(low + s, frequency, i + l);
        }
        start += frequency;
    }
    return start == SCALE;
}

template <class T>
DEVICE void decode(i64 first, i64 last, const u32 *sizes, const u8 *tiles, i64 available, i64 count, T *to, i64 op, u64 *status) {
    constexpr i64 TILE = Parts<T>::TILE, TABLE = 4 + 2 * Parts<T>::SYMBOLS;
    BLOCK_SHARED(typename DecodeSlot<T>::Entry, slots, SCALE);
    TileReader reader(sizes, (count + TILE - 1) / TILE + 1, available, Parts<T>::SLOT > TABLE ? Parts<T>::SLOT : TABLE);
    u64 at, size;
    const bool good = reader.find(0, at, size) && open_table<T>(tiles, size, slots);
    block_sync();
    if (!good) {
        report(status, STATUS_BAD_STREAM);
        return;
    }
    FOR_TILES(t) {
        const bool found = reader.find(t + 1, at, size);
        const i64 words_end = available - SLACK - (i64)at;
        const i64 own = (i64)size < words_end ? (i64)size : words_end;
        if (!found || !decode_tile<T>(tiles + at, own, slots, to, t * TILE, count, op)) report(status, STATUS_BAD_STREAM);
    }
}

#define SPLIT_KERNELS(T)                                                                                              \
    KERNEL(split_count_##T, const Layout<T>::U *from, i64 count, u32 *counts, u64 *done, u32 *table, u8 *slots, u32 *sizes, \
           u64 *starts) {                                                                                             \
        make_table_of<T>(first, last, from, count, counts, done, slots, sizes, starts, {table, table + Parts<T>::SYMBOLS});     \
    }                                                                                                                 \
    KERNEL(split_encode_##T, const Layout<T>::U *from, i64 count, u32 *table, u8 *slots, u32 *sizes, u64 *starts) {    \
        encode<T>(first, last, from, count, {table, table + Parts<T>::SYMBOLS}, slots, sizes, starts);                 \
    }                                                                                                                 \
    KERNEL(split_decode_##T, const u32 *sizes, const u8 *tiles, i64 available, i64 count, T *to, i64 op,               \
           u64 *status) {                                                                                             \
        decode<T>(first, last, sizes, tiles, available, count, to, op, status);                                       \
    }

SPLIT_KERNELS(f16)
SPLIT_KERNELS(bf16)
SPLIT_KERNELS(f32)
SPLIT_KERNELS(f64)
