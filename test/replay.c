// A fuzzer's function without the fuzzer: each of the files named (its corpus), once.
#include "request.h"
#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

int main(int argc, char **argv) {
    for (int i = 1; i < argc; i++) {
        Text file = {0};
        Error err = {0};
        fprintf(stderr, "%s\n", argv[i]); // the last one that is named is the one at fault
        if (!read_file(argv[i], &file, &err)) return fprintf(stderr, "%s\n", err.message), 1;
        LLVMFuzzerTestOneInput((const uint8_t *)file.data, file.n);
        free(file.data);
    }
    printf("%d inputs\n", argc - 1);
    return 0;
}
