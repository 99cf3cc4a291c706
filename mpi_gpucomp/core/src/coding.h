// Codecs as recordings: the kernels that encode or decode a chunk of a certain length, with their arguments.
//
// Python records what a kernel codec launches on a stream, once for each length; the core replays it on any chunk of
// that length. So a codec is written once, in Python and kernels, and runs without Python.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>
#include <vector>

namespace gpucomp {

// What an argument is relative to. The values are part of the interface with `codec/recording.py`. Results are the size
// and the status that kernels on a GPU write; on the host they are in scratch.
enum Base : int64_t { CONSTANT = 0, SOURCE = 1, TARGET = 2, SCRATCH = 3, NBYTES = 4, RESULT = 5 };

struct Arg {
    int64_t base, value;
};

struct Launch {
    enum Kind : int64_t { KERNEL = 0, COPY = 1, FILL = 2 };
    int64_t kind;
    void *function;
    int64_t tiles, grain;  // grain 0: all tiles on one core, in order; on a GPU the number of blocks
    std::vector<Arg> integers;  // on a GPU also the bits of doubles, all in their order
    std::vector<double> doubles;
};

struct Recording {
    std::vector<Launch> launches;
    int64_t scratch_bytes = 0;
    int64_t result = -1;             // offset in scratch of the size and the status that the kernels write; -1: none
    int64_t base = 0, slope = 0;     // the result is base + slope * size
    uint64_t unrepresentable = 0;    // status bits that mean: this codec cannot represent the data
    uint64_t least = 0, most = 0;    // valid lengths of what is decoded

    // Run the launches; return the size, and set the status.
    int64_t run(const void *source, void *target, int64_t nbytes, bool alone, uint64_t *status) const;

    static std::unique_ptr<Recording> parse(const int64_t *numbers, int64_t length);
};

// One candidate of the codec `auto`, for chunks of a certain length.
struct Candidate {
    uint32_t wire_id;
    const Recording *sample;
    double encode, decode;  // seconds per decoded byte
};

// How `auto` chooses for chunks of a certain length.
struct Chooser {
    int64_t block = 0, blocks = 0;  // a sample is this many blocks of this many elements; 0 blocks: the whole chunk
    double wire = 0, raw = 0, margin = 1;
    uint32_t raw_id = 0;
    std::vector<Candidate> candidates;
    int64_t chunks_per_sample = 1;
};

enum CodingStatus : int32_t {
    CODING_OK = 0,
    CODING_BAD_CHECKSUM = 1,
    CODING_BAD_HEADER = 2,   // not the codec, type, length or sequence that was expected
    CODING_BAD_PAYLOAD = 3,  // the decoder refuses the bytes
    CODING_MISSING = 4,      // not recorded: Python has to do it
    CODING_PYTHON = 5,       // Python has raised
    CODING_DEVICE = 6,       // the GPU has failed
    CODING_NO_MEMORY = 7,    // of the GPU
};

// A codec for one element type.
class Codec {
  public:
    uint32_t wire_id = 0;
    uint8_t dtype = 0;
    int64_t itemsize = 1;
    void *reduce = nullptr;  // kernel of raw chunks; nullptr: not defined for this type
    int64_t reduce_tile = 1024;
    bool external = false;   // Python does everything
    bool chooses = false;    // each chunk is encoded with another codec (`auto`)
    std::vector<uint32_t> accepted;  // wire ids that frames may have

    void add(int direction, uint32_t wire_id, int64_t op, int64_t count, std::unique_ptr<Recording> recording);
    void add_chooser(int64_t count, Chooser chooser);

    // Return the recording of a direction (0 encode, 1 decode), or nullptr.
    const Recording *find(int direction, uint32_t wire_id, int64_t op, int64_t count) const;

    bool accepts(uint32_t id) const { return std::find(accepted.begin(), accepted.end(), id) != accepted.end(); }

    // Return true if chunks of this length can be encoded without Python.
    bool encodes(int64_t count) const;

    // Encode `count` elements into a frame; return its length.
    int64_t encode(const void *source, int64_t count, uint8_t *frame, int64_t sequence, bool raw, bool alone);

    // Decode a frame whose header was read into `count` elements; `op` 0 replaces them, others reduce into them.
    CodingStatus decode(const uint8_t *frame, int64_t nbytes, void *target, int64_t count, int64_t op, int64_t sequence,
                        bool verified, bool alone) const;

    void reduce_raw(void *target, const void *source, int64_t count, int64_t op, bool alone) const;

  private:
    uint32_t choose(const uint8_t *source, int64_t count, bool alone);

    mutable std::mutex lock_;
    std::map<std::tuple<int, uint32_t, int64_t, int64_t>, std::unique_ptr<Recording>> recordings_;
    std::map<int64_t, Chooser> choosers_;
    std::map<const uint8_t *, std::pair<int64_t, uint32_t>> next_;  // the codec of the chunk that starts here, and for how many
};

}  // namespace gpucomp
