// Timeline of a device: kernels, copies and graph replays of any CUDA program, written as text when
// the program ends.
//
//     CUDA=folder with include/cupti.h and lib (a toolkit's targets/x86_64-linux or extras/CUPTI, or the wheel nvidia-cuda-cupti)
//     gcc -O2 -shared -fPIC -I$CUDA/include -o libtrace.so tools/gpu/trace.c -L$CUDA/lib -l:libcupti.so.13
//     CUDA_INJECTION64_PATH=$PWD/libtrace.so BURSAR_TRACE=trace.txt [BURSAR_TRACE_GRAPHS=1|BURSAR_TRACE_CALLS=1] bursar bench ...
//     python3 tools/gpu/trace.py trace.txt
//
// The driver loads the library before the program's first call (CUPTI's injection); the program
// needs no change. A line is "kind start end stream graph name", times in nanoseconds. Tracing each
// kernel costs about a microsecond per kernel and prevents kernels from starting early. With
// BURSAR_TRACE_GRAPHS a replay is one line and runs as it does without tracing. With
// BURSAR_TRACE_CALLS the lines are the host's driver calls of 20 microseconds or more, "call start
// end thread 0 name". They show where the time of a start goes (tools/gpu/calls.py).

#include <cupti.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

enum { BUFFER_BYTES = 8 << 20, SHORTEST_CALL_NANOSECONDS = 20000 };

static FILE *out;

static void give_buffer(uint8_t **buffer, size_t *bytes, size_t *records_max) {
    *bytes = BUFFER_BYTES;
    *records_max = 0;
    *buffer = aligned_alloc(8, BUFFER_BYTES);
}

static void write_record(const CUpti_Activity *record) {
    switch (record->kind) {
    case CUPTI_ACTIVITY_KIND_KERNEL:
    case CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL: {
        const CUpti_ActivityKernel10 *kernel = (const CUpti_ActivityKernel10 *)record;
        fprintf(out, "kernel %" PRIu64 " %" PRIu64 " %u %u %s\n", kernel->start, kernel->end, kernel->streamId,
                kernel->graphId, kernel->name ? kernel->name : "?");
        break;
    }
    case CUPTI_ACTIVITY_KIND_MEMCPY: {
        const CUpti_ActivityMemcpy6 *copy = (const CUpti_ActivityMemcpy6 *)record;
        fprintf(out, "copy %" PRIu64 " %" PRIu64 " %u %u copy_%u_of_%" PRIu64 "\n", copy->start, copy->end,
                copy->streamId, copy->graphId, copy->copyKind, copy->bytes);
        break;
    }
    case CUPTI_ACTIVITY_KIND_GRAPH_TRACE: {
        const CUpti_ActivityGraphTrace2 *graph = (const CUpti_ActivityGraphTrace2 *)record;
        fprintf(out, "graph %" PRIu64 " %" PRIu64 " %u %u graph\n", graph->start, graph->end, graph->streamId,
                graph->graphId);
        break;
    }
    case CUPTI_ACTIVITY_KIND_DRIVER:
    case CUPTI_ACTIVITY_KIND_RUNTIME: {
        const CUpti_ActivityAPI *call = (const CUpti_ActivityAPI *)record;
        if (call->end - call->start < SHORTEST_CALL_NANOSECONDS) break;
        const char *name = NULL;
        cuptiGetCallbackName(record->kind == CUPTI_ACTIVITY_KIND_DRIVER ? CUPTI_CB_DOMAIN_DRIVER_API
                                                                        : CUPTI_CB_DOMAIN_RUNTIME_API,
                             call->cbid, &name);
        fprintf(out, "call %" PRIu64 " %" PRIu64 " %u 0 %s\n", call->start, call->end, call->threadId, name ? name : "?");
        break;
    }
    default:
        break;
    }
}

static void take_buffer(CUcontext context, uint32_t stream, uint8_t *buffer, size_t bytes, size_t valid) {
    (void)context, (void)stream, (void)bytes;
    CUpti_Activity *record = NULL;
    while (cuptiActivityGetNextRecord(buffer, valid, &record) == CUPTI_SUCCESS)
        write_record(record);
    free(buffer);
}

static void finish(void) {
    cuptiActivityFlushAll(1);
    fclose(out);
}

int InitializeInjection(void) {
    const char *path = getenv("BURSAR_TRACE");
    out = fopen(path ? path : "trace.txt", "w");
    if (!out) return 0;
    cuptiActivityRegisterCallbacks(give_buffer, take_buffer);
    atexit(finish);
    if (getenv("BURSAR_TRACE_CALLS")) {
        cuptiActivityEnable(CUPTI_ACTIVITY_KIND_DRIVER);
        cuptiActivityEnable(CUPTI_ACTIVITY_KIND_RUNTIME);
        return 1;
    }
    cuptiActivityEnable(getenv("BURSAR_TRACE_GRAPHS") ? CUPTI_ACTIVITY_KIND_GRAPH_TRACE
                                                      : CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL);
    if (getenv("BURSAR_TRACE_GRAPHS")) cuptiActivityEnable(CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL);
    cuptiActivityEnable(CUPTI_ACTIVITY_KIND_MEMCPY);
    return 1;
}
