// Reads the text of a PTX module: one instruction in a line, as NVRTC writes it.
#include <cstring>
#include <sstream>

#include "ptx.h"

namespace simcuda::ptx {

namespace {

const std::map<std::string, Code> CODES = {
    {"abs", Code::ABS},   {"add", Code::ADD},   {"and", Code::AND},       {"atom", Code::ATOM}, {"bar", Code::BAR},
    {"bfi", Code::BFI},   {"bra", Code::BRA},   {"clz", Code::CLZ},       {"cvt", Code::CVT},   {"cvta", Code::CVTA},
    {"div", Code::DIV},   {"exit", Code::EXIT}, {"ld", Code::LD},         {"mad", Code::MAD},   {"max", Code::MAX},
    {"min", Code::MIN},   {"mov", Code::MOV},   {"membar", Code::MEMBAR}, {"mul", Code::MUL},   {"neg", Code::NEG},
    {"not", Code::NOT},   {"or", Code::OR},     {"popc", Code::POPC},     {"prmt", Code::PRMT}, {"rcp", Code::RCP},
    {"rem", Code::REM},   {"ret", Code::EXIT},  {"selp", Code::SELP},     {"setp", Code::SETP}, {"shfl", Code::SHFL},
    {"shl", Code::SHL},   {"shr", Code::SHR},   {"st", Code::ST},         {"sub", Code::SUB},   {"vote", Code::VOTE},
    {"xor", Code::XOR},
};
const std::map<std::string, Compare> COMPARISONS = {
    {"eq", Compare::EQ},   {"ne", Compare::NE},   {"lt", Compare::LT},   {"le", Compare::LE},
    {"gt", Compare::GT},   {"ge", Compare::GE},   {"lo", Compare::LT},   {"ls", Compare::LE},
    {"hi", Compare::GT},   {"hs", Compare::GE},   {"equ", Compare::EQU}, {"neu", Compare::NEU},
    {"ltu", Compare::LTU}, {"leu", Compare::LEU}, {"gtu", Compare::GTU}, {"geu", Compare::GEU},
};
const std::map<std::string, Shuffle> SHUFFLES = {
    {"idx", Shuffle::IDX}, {"up", Shuffle::UP}, {"down", Shuffle::DOWN}, {"bfly", Shuffle::BFLY}};
const std::map<std::string, Space> SPACES = {
    {"global", Space::GLOBAL}, {"shared", Space::SHARED}, {"param", Space::PARAM}};
const char *const SPECIAL[] = {"%tid.x", "%ctaid.x", "%ntid.x", "%nctaid.x"};

std::string trimmed(const std::string &text) {
    const size_t first = text.find_first_not_of(" \t"), last = text.find_last_not_of(" \t");
    return first == std::string::npos ? "" : text.substr(first, last - first + 1);
}

std::vector<std::string> split(const std::string &text, char at) {
    std::vector<std::string> parts;
    int depth = 0;
    std::string part;
    for (const char c : text) {
        if (c == '{' || c == '[') ++depth;
        if (c == '}' || c == ']') --depth;
        if (c == at && !depth) {
            parts.push_back(trimmed(part));
            part.clear();
        } else {
            part += c;
        }
    }
    if (!trimmed(part).empty()) parts.push_back(trimmed(part));
    return parts;
}

bool type_of(const std::string &word, Type *type) {
    if (word == "pred") return *type = {'p', 1}, true;
    if (word.size() < 2 || !strchr("busf", word[0])) return false;
    for (const int bits : {8, 16, 32, 64})
        if (word.substr(1) == std::to_string(bits)) return *type = {word[0], (u8)bits}, true;
    return false;
}

class Parser {
public:
    std::shared_ptr<Program> program = std::make_shared<Program>();

    void line(const std::string &text) {
        ++number_;
        const std::string words = trimmed(text.substr(0, text.find("//")));
        if (words.empty()) return;
        if (!kernel_)
            outside(words);
        else if (words == "}")
            end();
        else
            inside(words);
    }

    void finish() {
        if (kernel_) unknown("a module that ends within a kernel");
        program->memory.resize((used_ + 7) / 8);
        if (used_) memcpy(program->memory.data(), bytes_.data(), used_);
        // Addresses of constants are known only now.
        for (auto &[name, kernel] : program->kernels)
            for (const auto &[slot, offset] : addresses_[name]) kernel.constants[slot] = program->base() + offset;
    }

private:
    u32 number_ = 0;
    Kernel *kernel_ = nullptr;
    std::vector<u8> bytes_;
    u64 used_ = 0;
    std::map<std::string, std::pair<u32, u32>> registers_;  // of a prefix: the first slot, and how many
    std::map<std::string, u32> labels_;
    std::vector<std::pair<u32, std::string>> jumps_;
    std::map<std::string, std::vector<std::pair<u32, u64>>> addresses_;

    [[noreturn]] void unknown(const std::string &what) const {
        throw "line " + std::to_string(number_) + ": expected PTX as NVRTC writes it for these kernels, got '" + what + "'";
    }

    u64 integer(const std::string &text) const {
        size_t read = 0;
        const bool negative = text[0] == '-';
        u64 value = 0;
        try {
            value = std::stoull(text.substr(negative), &read, 0);
        } catch (const std::exception &) {
            unknown(text);
        }
        read += negative;
        while (read < text.size() && (text[read] == 'U' || text[read] == 'L')) ++read;
        if (read != text.size()) unknown(text);
        return negative ? 0 - value : value;
    }

    u64 number(const std::string &text) const {
        if (text.compare(0, 2, "0f") == 0 || text.compare(0, 2, "0d") == 0 || text.compare(0, 2, "0F") == 0 ||
            text.compare(0, 2, "0D") == 0)
            return integer("0x" + text.substr(2));
        return integer(text);
    }

    void outside(const std::string &words) {
        if (words.compare(0, 8, ".version") == 0 || words.compare(0, 7, ".target") == 0 ||
            words.compare(0, 13, ".address_size") == 0 || words == ")" || words[0] == '(')
            return;
        const size_t entry = words.find(".entry ");
        if (entry != std::string::npos) {
            std::string name = words.substr(entry + 7);
            name = trimmed(name.substr(0, name.find('(')));
            kernel_ = &program->kernels[name];
            kernel_->name = name;
            registers_.clear();
            labels_.clear();
            jumps_.clear();
            return;
        }
        if (words.find(".global ") != std::string::npos || words.find(".const ") != std::string::npos)
            return constant(words);
        unknown(words);
    }

    // .global .align 4 .u32 NAME = 5;   .global .align 4 .b8 NAME[64] = {1, 2};
    void constant(const std::string &words) {
        const size_t equals = words.find('=');
        std::istringstream head(words.substr(0, std::min(equals, words.find(';'))));
        std::string word, name;
        Type type;
        u64 align = 1, count = 1;
        while (head >> word) {
            if (word == ".align") {
                head >> align;
            } else if (word[0] == '.') {
                type_of(word.substr(1), &type);
            } else {
                name = word.substr(0, word.find('['));
                if (word.find('[') != std::string::npos) count = integer(word.substr(name.size() + 1, word.find(']') - name.size() - 1));
            }
        }
        if (name.empty() || !type.bits) unknown(words);
        const u64 size = type.bits / 8;
        used_ = (used_ + align - 1) / align * align;
        program->globals[name] = used_;
        bytes_.resize(used_ + size * count);
        if (equals != std::string::npos) {
            std::string values = trimmed(words.substr(equals + 1));
            values = values.substr(0, values.rfind(';'));
            if (values[0] == '{') values = values.substr(1, values.rfind('}') - 1);
            u64 at = used_;
            for (const std::string &value : split(values, ',')) {
                const u64 bits = number(value);
                if (at + size > bytes_.size()) unknown(words);
                memcpy(&bytes_[at], &bits, size);
                at += size;
            }
        }
        used_ += size * count;
    }

    void end() {
        for (const auto &[instruction, label] : jumps_) {
            if (!labels_.count(label)) unknown(label);
            kernel_->code[instruction].target = labels_[label];
        }
        Instruction last{};
        last.code = Code::EXIT;
        last.text = "}";
        last.line = number_;
        kernel_->code.push_back(last);
        kernel_ = nullptr;
    }

    void inside(const std::string &words) {
        if (words.compare(0, 6, ".param") == 0) {
            std::string name = words.substr(words.rfind(' ') + 1);
            if (name.back() == ',') name.pop_back();
            kernel_->parameters.push_back(name);
            kernel_->kinds += words.find(".f64") == std::string::npos ? 'w' : 'd';
        } else if (words.compare(0, 4, ".reg") == 0) {
            const size_t prefix = words.find('%'), count = words.find('<');
            if (prefix == std::string::npos || count == std::string::npos) unknown(words);
            const u32 many = (u32)integer(words.substr(count + 1, words.find('>') - count - 1));
            registers_[words.substr(prefix, count - prefix)] = {kernel_->registers, many};
            kernel_->registers += many;
        } else if (words.compare(0, 7, ".shared") == 0) {
            std::istringstream head(words);
            std::string word, name;
            Type type;
            u32 align = 1, count = 1;
            while (head >> word) {
                if (word == ".align")
                    head >> align;
                else if (word[0] == '.')
                    type_of(word.substr(1), &type);
                else {
                    name = word.substr(0, word.find_first_of("[;"));
                    if (word.find('[') != std::string::npos) count = (u32)integer(word.substr(name.size() + 1, word.find(']') - name.size() - 1));
                }
            }
            u32 &used = kernel_->shared_bytes;
            used = (used + align - 1) / align * align;
            kernel_->shared.push_back({name, used});
            used += type.bits / 8 * count;
        } else if (words[0] == '$' && words.back() == ':') {
            labels_[words.substr(0, words.size() - 1)] = (u32)kernel_->code.size();
        } else if (words == ")" || words == "{" || words == "(" || words.compare(0, 7, ".pragma") == 0 ||
                   words.compare(0, 7, ".maxnti") == 0 || words.compare(0, 7, ".minnct") == 0) {
            return;
        } else if (words[0] == '.') {
            unknown(words);
        } else {
            instruction(words);
        }
    }

    // The slots behind the registers: special registers, then constants. Both are known only when all registers are,
    // which the first instruction shows.
    u32 special() {
        if (!registers_.count("")) {
            registers_[""] = {kernel_->registers, 4};
            kernel_->registers += 4;
        }
        return registers_[""].first;
    }

    u32 constant_slot(u64 value) {
        special();
        auto &constants = kernel_->constants;
        for (u32 i = 0; i < constants.size(); ++i)
            if (constants[i] == value) return kernel_->registers + i;
        constants.push_back(value);
        return kernel_->registers + (u32)constants.size() - 1;
    }

    u32 slot(const std::string &operand) {
        if (operand == "_") return NOWHERE;
        const u32 behind = special();
        for (u32 i = 0; i < 4; ++i)
            if (operand == SPECIAL[i]) return behind + i;
        if (operand[0] == '%') {
            const size_t digit = operand.find_first_of("0123456789");
            const auto known = registers_.find(operand.substr(0, digit));
            if (digit == std::string::npos || known == registers_.end()) unknown(operand);
            const u64 index = integer(operand.substr(digit));
            if (index >= known->second.second) unknown(operand);
            return known->second.first + (u32)index;
        }
        for (const auto &[name, offset] : kernel_->shared)
            if (operand == name) return constant_slot(offset);
        if (program->globals.count(operand)) {
            // A value that no other constant has, until the address is known.
            const u64 offset = program->globals[operand], mark = 0x6cd5a11000000000 + offset;
            const u32 made = constant_slot(mark);
            addresses_[kernel_->name].push_back({made - kernel_->registers, offset});
            return made;
        }
        return constant_slot(number(operand));
    }

    std::vector<u32> slots(const std::string &operand) {
        std::vector<u32> all;
        if (operand[0] != '{') return {slot(operand)};
        for (const std::string &one : split(operand.substr(1, operand.size() - 2), ',')) all.push_back(slot(one));
        if (all.size() > 4) unknown(operand);
        return all;
    }

    // [%rd4+8], [name]
    void address(const std::string &operand, Instruction *made) {
        if (operand.front() != '[' || operand.back() != ']') unknown(operand);
        const std::string within = operand.substr(1, operand.size() - 2);
        if (made->space == Space::PARAM) {
            for (u32 i = 0; i < kernel_->parameters.size(); ++i)
                if (kernel_->parameters[i] == within) return void(made->from[0] = i);
            unknown(operand);
        }
        const size_t plus = within.find('+');
        made->from[0] = slot(trimmed(within.substr(0, plus)));
        if (plus != std::string::npos) made->offset = (i64)integer(trimmed(within.substr(plus + 1)));
    }

    void instruction(std::string words) {
        Instruction made{};
        made.text = words;
        made.line = number_;
        if (words.back() != ';') unknown(words);
        words.pop_back();
        if (words[0] == '@') {
            const size_t space = words.find_first_of(" \t");
            made.guarded = true;
            made.negated = words[1] == '!';
            made.guard = slot(words.substr(1 + made.negated, space - 1 - made.negated));
            words = trimmed(words.substr(space));
        }
        const size_t space = words.find_first_of(" \t");
        const std::vector<std::string> name = split(words.substr(0, space), '.');
        std::vector<std::string> operands;
        if (space != std::string::npos) operands = split(words.substr(space), ',');
        const auto known = CODES.find(name[0]);
        if (known == CODES.end()) unknown(made.text);
        made.code = known->second;
        for (size_t i = 1; i < name.size(); ++i) modifier(name[i], &made);
        // Of two types the first is that of the result.
        if (made.code == Code::CVT && !made.source.bits) unknown(made.text);
        if (made.code == Code::BRA) {
            jumps_.push_back({(u32)kernel_->code.size(), operands.at(0)});
        } else if (made.code == Code::LD || made.code == Code::ATOM) {
            const std::vector<u32> to = slots(operands.at(0));
            made.width = (u32)to.size();
            std::copy(to.begin(), to.end(), made.to);
            address(operands.at(1), &made);
            if (made.code == Code::ATOM) made.from[1] = slot(operands.at(2));
        } else if (made.code == Code::ST) {
            const std::vector<u32> from = slots(operands.at(1));
            made.width = (u32)from.size();
            address(operands.at(0), &made);
            std::copy(from.begin(), from.end(), made.to);  // read, not written: see `run`
        } else if (made.code == Code::MOV && operands.at(0)[0] == '{') {
            made.code = Code::UNPACK;
            const std::vector<u32> to = slots(operands.at(0));
            made.width = (u32)to.size();
            std::copy(to.begin(), to.end(), made.to);
            made.from[0] = slot(operands.at(1));
        } else if (made.code == Code::MOV && operands.at(1)[0] == '{') {
            made.code = Code::PACK;
            made.to[0] = slot(operands[0]);
            const std::vector<u32> from = slots(operands[1]);
            made.width = (u32)from.size();
            std::copy(from.begin(), from.end(), made.from);
        } else if (!operands.empty() && made.code == Code::BAR) {
            made.from[0] = slot(operands[0]);
        } else if (!operands.empty()) {
            const size_t bar = operands[0].find('|');
            made.to[0] = slot(operands[0].substr(0, bar));
            if (bar != std::string::npos) made.to[1] = slot(operands[0].substr(bar + 1));
            if (operands.size() > 5) unknown(made.text);
            for (size_t i = 1; i < operands.size(); ++i) made.from[i - 1] = slot(operands[i]);
        }
        if (made.code == Code::MEMBAR || (made.code == Code::BAR && !made.of_warp)) kernel_->fences = true;
        kernel_->code.push_back(made);
    }

    void modifier(const std::string &word, Instruction *made) {
        const Code code = made->code;
        Type type;
        if (type_of(word, &type)) {
            if (code == Code::CVT && made->type.bits)
                made->source = type;
            else if (!made->type.bits)
                made->type = type;
            else
                unknown(made->text);
        } else if ((code == Code::LD || code == Code::ST || code == Code::ATOM || code == Code::CVTA) && SPACES.count(word)) {
            made->space = SPACES.at(word);
        } else if (code == Code::SETP && COMPARISONS.count(word)) {
            made->compare = COMPARISONS.at(word);
        } else if (code == Code::SHFL && SHUFFLES.count(word)) {
            made->shuffle = SHUFFLES.at(word);
        } else if (word == "sync" && (code == Code::SHFL || code == Code::VOTE || code == Code::BAR)) {
            made->sync = true;
        } else if (word == "warp" && code == Code::BAR) {
            made->of_warp = true;
        } else if ((code == Code::MUL || code == Code::MAD) && (word == "lo" || word == "hi" || word == "wide")) {
            made->part = word == "lo" ? Part::LOW : word == "hi" ? Part::HIGH : Part::WIDE;
        } else if (word == "rzi" && code == Code::CVT) {
            made->toward_zero = true;
        } else if (word == "volatile" && code == Code::LD) {
            made->strong = true;
        } else if (word == "to" && code == Code::CVTA) {
            made->to_space = true;
        } else if (word == "or" && code == Code::ATOM) {
            made->compare = Compare::NE;  // of two operations, see `run`
        } else {
            const bool plain = (word == "rn" && (made->code != Code::MAD)) || (word == "uni" && code == Code::BRA) ||
                               // An atomic that says nothing is relaxed, and of the whole GPU.
                               ((word == "add" || word == "relaxed" || word == "gpu") && code == Code::ATOM) ||
                               (word == "nc" && code == Code::LD) ||
                               ((word == "v2" || word == "v4") && (code == Code::LD || code == Code::ST)) ||
                               (word == "ballot" && code == Code::VOTE) || (word == "gl" && code == Code::MEMBAR);
            if (!plain) unknown(made->text);
        }
    }
};

}  // namespace

std::shared_ptr<Program> parse(const std::string &text) {
    Parser parser;
    std::istringstream lines(text.substr(0, text.find('\0')));
    for (std::string line; std::getline(lines, line);) parser.line(line);
    parser.finish();
    return parser.program;
}

}  // namespace simcuda::ptx
