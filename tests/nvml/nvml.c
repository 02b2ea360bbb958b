/* A simulated libnvidia-ml.so.1: the calls that CapyCTL makes of NVML, answered from a text file.
 *
 * The file's path is in CAPYCTL_TEST_NVML; it is read again at each call, so a test changes the machine by
 * replacing the file (card.py does). Without the variable, or without the file, there is no driver.
 * One fact per line; README.md lists them. Memory of a process that has ended vanishes by itself, as a real
 * driver's does, at once or so many seconds after somebody first saw that it had ended.
 *
 * Names, numbers and layouts follow NVML's public API reference.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

typedef int result;
typedef void *device;
typedef unsigned long long u64;

enum {
    SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NO_PERMISSION = 4, NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7, DRIVER_NOT_LOADED = 9, TIMEOUT = 10, LIBRARY_NOT_FOUND = 12, FUNCTION_NOT_FOUND = 13,
    GPU_IS_LOST = 15, RESET_REQUIRED = 16, MEMORY = 20, UNKNOWN = 999
};

#define CARDS 16
#define HOLDS 256
#define NOT_AVAILABLE (~0ULL)

struct memory { u64 total, free, used; };
struct memory_v2 { unsigned version; u64 total, reserved, free, used; };
struct process_v1 { unsigned pid; u64 used; };
struct process_v2 { unsigned pid; u64 used; unsigned gpu_instance, compute_instance; };
struct pci { char legacy[16]; unsigned domain, bus, device, pci_id, subsystem; char id[32]; };

struct card {
    int index, fault, mig, major, minor;
    int hide_name, hide_uuid, hide_memory, hide_processes, hide_usage;
    double hang;
    char uuid[96], bus[32], name[96];
    u64 total, reserved;
};
struct hold { int card; long pid; u64 start, bytes; double late; };
struct machine {
    int init, fault, cards, holds;
    double hang;
    char driver[80], nvml[80];
    struct card card[CARDS];
    struct hold hold[HOLDS];
};

static int inits; /* nvmlInit counts */

/* --- processes ------------------------------------------------------------------------------------ */

/* Whether that very process still lives: its start in clock ticks after boot is field 22 of its stat. */
static int lives(long pid, u64 start)
{
    char path[64], text[1024], *rest;
    snprintf(path, sizeof path, "/proc/%ld/stat", pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return 0;
    ssize_t size = read(fd, text, sizeof text - 1);
    close(fd);
    if (size <= 0)
        return 0;
    text[size] = 0;
    rest = strrchr(text, ')');
    char state;
    u64 started;
    if (!rest || sscanf(rest + 2, "%c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %llu",
                        &state, &started) != 2)
        return 0;
    return started == start && state != 'Z' && state != 'X';
}

/* Whether an ended process's memory is still in use: a mark beside the file says when it was first seen ended. */
static int lingers(const char *file, const struct hold *held)
{
    char mark[4200];
    struct stat seen;
    struct timespec now;
    if (held->late <= 0)
        return 0;
    snprintf(mark, sizeof mark, "%s.%ld.%llu.ended", file, held->pid, held->start);
    int fd = open(mark, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (fd >= 0)
        close(fd);
    if (stat(mark, &seen))
        return 0;
    clock_gettime(CLOCK_REALTIME, &now);
    return (now.tv_sec - seen.st_mtim.tv_sec) + (now.tv_nsec - seen.st_mtim.tv_nsec) / 1e9 < held->late;
}

/* --- the state file --------------------------------------------------------------------------------- */

static struct card *card_of(struct machine *m, int index)
{
    for (int i = 0; i < m->cards; i++)
        if (m->card[i].index == index)
            return &m->card[i];
    return NULL;
}

static void line_of(struct machine *m, const char *file, const char *line)
{
    char word[16], text[96];
    int index, number;
    double seconds;
    struct card *card;
    if (sscanf(line, "driver %79[^\n]", m->driver) == 1 || sscanf(line, "nvml %79[^\n]", m->nvml) == 1)
        return;
    if (sscanf(line, "init %d", &m->init) == 1 || sscanf(line, "fault all %d", &m->fault) == 1 ||
        sscanf(line, "hang all %lf", &m->hang) == 1)
        return;
    if (!strncmp(line, "card ", 5) && m->cards < CARDS) {
        struct card new = {.major = 8, .minor = 9};
        if (sscanf(line, "card %d %95s %31s %llu %llu", &new.index, new.uuid, new.bus, &new.total, &new.reserved) == 5)
            m->card[m->cards++] = new;
    } else if (!strncmp(line, "hold ", 5) && m->holds < HOLDS) {
        struct hold new;
        if (sscanf(line, "hold %d %ld %llu %llu %lf", &new.card, &new.pid, &new.start, &new.bytes, &new.late) == 5) {
            /* Process 0 is nobody that NVML lists: its memory is in use until the file says otherwise. */
            if (new.pid == 0 || lives(new.pid, new.start))
                m->hold[m->holds++] = new;
            else if (lingers(file, &new)) {
                new.pid = 0;
                m->hold[m->holds++] = new;
            }
        }
    } else if (sscanf(line, "%15s %d", word, &index) == 2 && (card = card_of(m, index))) {
        if (sscanf(line, "name %*d %95[^\n]", text) == 1)
            strcpy(card->name, text);
        else if (sscanf(line, "fault %*d %d", &number) == 1)
            card->fault = number;
        else if (sscanf(line, "mig %*d %d", &number) == 1)
            card->mig = number;
        else if (sscanf(line, "hang %*d %lf", &seconds) == 1)
            card->hang = seconds;
        else if (sscanf(line, "compute %*d %d %d", &card->major, &card->minor) == 2)
            return;
        else if (sscanf(line, "hide %*d %15s", word) == 1) {
            card->hide_name |= !strcmp(word, "name");
            card->hide_uuid |= !strcmp(word, "uuid");
            card->hide_memory |= !strcmp(word, "memory");
            card->hide_processes |= !strcmp(word, "processes");
            card->hide_usage |= !strcmp(word, "usage");
        }
    }
}

static void wait_for(double seconds)
{
    struct timespec left = {(time_t)seconds, (long)((seconds - (double)(time_t)seconds) * 1e9)};
    while (seconds > 0 && nanosleep(&left, &left) && errno == EINTR)
        ;
}

/* The machine as the file says now, after the hang that it asks for. */
static result look(struct machine *m)
{
    const char *file = getenv("CAPYCTL_TEST_NVML");
    FILE *lines = file && *file ? fopen(file, "re") : NULL;
    char line[512];
    memset(m, 0, sizeof *m);
    if (!lines)
        return DRIVER_NOT_LOADED;
    while (fgets(line, sizeof line, lines))
        line_of(m, file, line);
    fclose(lines);
    wait_for(m->hang);
    return SUCCESS;
}

static result machine_of(struct machine *m)
{
    if (!inits)
        return UNINITIALIZED;
    result looked = look(m);
    return looked ? looked : m->fault;
}

/* A handle is the card's index, plus 1. */
static result card_at(struct machine *m, device handle, struct card **card)
{
    result looked = machine_of(m);
    if (looked)
        return looked;
    *card = card_of(m, (int)(size_t)handle - 1);
    if (!*card)
        return INVALID_ARGUMENT;
    wait_for((*card)->hang);
    return (*card)->fault;
}

static result text_into(char *to, unsigned size, const char *from)
{
    if (!to)
        return INVALID_ARGUMENT;
    if (strlen(from) + 1 > size)
        return INSUFFICIENT_SIZE;
    strcpy(to, from);
    return SUCCESS;
}

/* --- the library ---------------------------------------------------------------------------------------- */

result nvmlInitWithFlags(unsigned flags)
{
    struct machine m;
    (void)flags;
    result looked = look(&m);
    if (!looked)
        looked = m.init;
    if (!looked)
        inits++;
    return looked;
}
result nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
result nvmlInit(void) { return nvmlInitWithFlags(0); }

result nvmlShutdown(void)
{
    if (!inits)
        return UNINITIALIZED;
    inits--;
    return SUCCESS;
}

const char *nvmlErrorString(result code)
{
    switch (code) {
    case SUCCESS: return "The operation was successful";
    case UNINITIALIZED: return "Uninitialized";
    case INVALID_ARGUMENT: return "Invalid Argument";
    case NOT_SUPPORTED: return "Not Supported";
    case NO_PERMISSION: return "Insufficient Permissions";
    case NOT_FOUND: return "Not Found";
    case INSUFFICIENT_SIZE: return "Insufficient Size";
    case DRIVER_NOT_LOADED: return "Driver Not Loaded";
    case TIMEOUT: return "Timeout";
    case LIBRARY_NOT_FOUND: return "NVML Shared Library Not Found";
    case FUNCTION_NOT_FOUND: return "Function Not Found";
    case GPU_IS_LOST: return "GPU is lost";
    case RESET_REQUIRED: return "GPU requires reset";
    case MEMORY: return "Insufficient Memory";
    default: return "Unknown Error";
    }
}

result nvmlSystemGetDriverVersion(char *version, unsigned length)
{
    struct machine m;
    result looked = machine_of(&m);
    return looked ? looked : text_into(version, length, m.driver);
}

result nvmlSystemGetNVMLVersion(char *version, unsigned length)
{
    struct machine m;
    result looked = machine_of(&m);
    return looked ? looked : text_into(version, length, m.nvml);
}

result nvmlSystemGetCudaDriverVersion_v2(int *version)
{
    struct machine m;
    result looked = machine_of(&m);
    *version = 13000;
    return looked;
}
result nvmlSystemGetCudaDriverVersion(int *version) { return nvmlSystemGetCudaDriverVersion_v2(version); }

result nvmlDeviceGetCount_v2(unsigned *count)
{
    struct machine m;
    result looked = machine_of(&m);
    *count = (unsigned)m.cards;
    return looked;
}
result nvmlDeviceGetCount(unsigned *count) { return nvmlDeviceGetCount_v2(count); }

result nvmlDeviceGetHandleByIndex_v2(unsigned index, device *handle)
{
    struct machine m;
    struct card *card;
    *handle = (device)(size_t)(index + 1);
    return card_at(&m, *handle, &card);
}
result nvmlDeviceGetHandleByIndex(unsigned index, device *handle) { return nvmlDeviceGetHandleByIndex_v2(index, handle); }

static result find(const char *text, int by_bus, device *handle)
{
    struct machine m;
    result looked = machine_of(&m);
    for (int i = 0; !looked && i < m.cards; i++)
        if (!strcasecmp(text, by_bus ? m.card[i].bus : m.card[i].uuid)) {
            *handle = (device)(size_t)(m.card[i].index + 1);
            return m.card[i].fault;
        }
    return looked ? looked : NOT_FOUND;
}
result nvmlDeviceGetHandleByUUID(const char *uuid, device *handle) { return find(uuid, 0, handle); }
result nvmlDeviceGetHandleByPciBusId_v2(const char *bus, device *handle) { return find(bus, 1, handle); }
result nvmlDeviceGetHandleByPciBusId(const char *bus, device *handle) { return find(bus, 1, handle); }

result nvmlDeviceGetIndex(device handle, unsigned *index)
{
    struct machine m;
    struct card *card;
    result looked = card_at(&m, handle, &card);
    if (!looked)
        *index = (unsigned)card->index;
    return looked;
}

result nvmlDeviceGetName(device handle, char *name, unsigned length)
{
    struct machine m;
    struct card *card;
    result looked = card_at(&m, handle, &card);
    return looked ? looked : card->hide_name ? UNKNOWN : text_into(name, length, card->name);
}

result nvmlDeviceGetUUID(device handle, char *uuid, unsigned length)
{
    struct machine m;
    struct card *card;
    result looked = card_at(&m, handle, &card);
    return looked ? looked : card->hide_uuid ? NOT_SUPPORTED : text_into(uuid, length, card->uuid);
}

result nvmlDeviceGetPciInfo_v3(device handle, struct pci *pci)
{
    struct machine m;
    struct card *card;
    result looked = card_at(&m, handle, &card);
    if (looked)
        return looked;
    memset(pci, 0, sizeof *pci);
    strncpy(pci->id, card->bus, sizeof pci->id - 1);
    strncpy(pci->legacy, strlen(card->bus) > 12 ? card->bus + 4 : card->bus, sizeof pci->legacy - 1);
    sscanf(card->bus, "%x:%x:%x", &pci->domain, &pci->bus, &pci->device);
    return SUCCESS;
}
result nvmlDeviceGetPciInfo(device handle, struct pci *pci) { return nvmlDeviceGetPciInfo_v3(handle, pci); }

result nvmlDeviceGetCudaComputeCapability(device handle, int *major, int *minor)
{
    struct machine m;
    struct card *card;
    result looked = card_at(&m, handle, &card);
    if (!looked)
        *major = card->major, *minor = card->minor;
    return looked;
}

result nvmlDeviceGetArchitecture(device handle, unsigned *architecture)
{
    struct machine m;
    struct card *card;
    result looked = card_at(&m, handle, &card);
    if (!looked) /* Turing 6, Ampere 7, Ada 8, Hopper 9, Blackwell 10 */
        *architecture = card->major >= 10 ? 10 : card->major == 9 ? 9 : card->major == 8 ? (card->minor == 9 ? 8 : 7) : 6;
    return looked;
}

result nvmlDeviceGetMigMode(device handle, unsigned *current, unsigned *pending)
{
    struct machine m;
    struct card *card;
    result looked = card_at(&m, handle, &card);
    if (looked)
        return looked;
    if (card->major < 8 || card->minor == 9)
        return NOT_SUPPORTED; /* a card that cannot be divided */
    *current = *pending = (unsigned)card->mig;
    return SUCCESS;
}

result nvmlDeviceIsMigDeviceHandle(device handle, unsigned *divided)
{
    (void)handle;
    *divided = 0;
    return SUCCESS;
}

static u64 used_on(const struct machine *m, const struct card *card)
{
    u64 used = card->reserved;
    for (int i = 0; i < m->holds; i++)
        if (m->hold[i].card == card->index)
            used += m->hold[i].bytes;
    return used < card->total ? used : card->total;
}

result nvmlDeviceGetMemoryInfo(device handle, struct memory *memory)
{
    struct machine m;
    struct card *card;
    result looked = card_at(&m, handle, &card);
    if (looked)
        return looked;
    if (!card->total)
        return NOT_SUPPORTED;
    if (card->hide_memory)
        return UNKNOWN;
    memory->total = card->total;
    memory->used = used_on(&m, card);
    memory->free = card->total - memory->used;
    return SUCCESS;
}

result nvmlDeviceGetMemoryInfo_v2(device handle, struct memory_v2 *memory)
{
    struct machine m;
    struct card *card;
    result looked = card_at(&m, handle, &card);
    if (looked)
        return looked;
    if (!card->total)
        return NOT_SUPPORTED;
    if (card->hide_memory)
        return UNKNOWN;
    memory->total = card->total;
    memory->reserved = card->reserved;
    memory->free = card->total - used_on(&m, card);
    memory->used = card->total - memory->free - card->reserved;
    return SUCCESS;
}

/* One row per process; a process with several holds is one. `rows` is of `size` bytes each. */
static result processes(device handle, unsigned *count, char *rows, size_t size)
{
    struct machine m;
    struct card *card;
    struct process_v2 row[HOLDS];
    unsigned found = 0, room = *count;
    result looked = card_at(&m, handle, &card);
    if (looked)
        return looked;
    if (card->hide_processes)
        return NOT_SUPPORTED;
    for (int i = 0; i < m.holds; i++) {
        unsigned at = 0;
        if (m.hold[i].card != card->index || m.hold[i].pid == 0)
            continue;
        while (at < found && row[at].pid != (unsigned)m.hold[i].pid)
            at++;
        if (at == found)
            row[found++] = (struct process_v2){(unsigned)m.hold[i].pid, 0, 0xffffffff, 0xffffffff};
        row[at].used += m.hold[i].bytes;
    }
    *count = found;
    if (found > room || (found && !rows))
        return INSUFFICIENT_SIZE;
    for (unsigned i = 0; i < found; i++) {
        if (card->hide_usage)
            row[i].used = NOT_AVAILABLE;
        memcpy(rows + i * size, &row[i], size); /* version 1 is the beginning of version 2 */
    }
    return SUCCESS;
}
result nvmlDeviceGetComputeRunningProcesses(device handle, unsigned *count, struct process_v1 *rows)
{
    return processes(handle, count, (char *)rows, sizeof *rows);
}
result nvmlDeviceGetComputeRunningProcesses_v2(device handle, unsigned *count, struct process_v2 *rows)
{
    return processes(handle, count, (char *)rows, sizeof *rows);
}
result nvmlDeviceGetComputeRunningProcesses_v3(device handle, unsigned *count, struct process_v2 *rows)
{
    return processes(handle, count, (char *)rows, sizeof *rows);
}
