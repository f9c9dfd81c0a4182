/* hugging_face.h: directories of models as transformers has them, and their config.json: what a file says of how to
 * compute is read, or refused by its key and value. Include it after dtrain.h.
 *
 *     DIR/config.json           sizes, and how to compute
 *     DIR/model.safetensors     weights, or model.safetensors.index.json and several files */
#ifndef HUGGING_FACE_H
#define HUGGING_FACE_H

#include "tools/files.h"
#include "tools/json.h"

#include <math.h>
#include <sys/stat.h>

typedef struct hf_config {
    char path[4096];
    char *text; /* (bytes); NULL: there is no such file */
    size_t bytes;
} hf_config;

/* A key that must have one of some values, with "|" between; "": null. What has no key is as transformers has it by
 * default, and need not be there. */
typedef struct hf_rule {
    const char *key, *values;
} hf_rule;

enum {
    HF_NAME = 512, /* bytes of a key, its 0 included ... */
    HF_VALUE = 256 /* ... and of a value that is looked at */
};

/* Write the file of weights that a path means: of a directory, that in it. */
static inline dtrain_result hf_weights(const char *path, char *weights, size_t room)
{
    struct stat about;
    const bool inside = stat(path, &about) == 0 && S_ISDIR(about.st_mode);
    char other[4096];
    snprintf(weights, room, inside ? "%s/model.safetensors" : "%s", path);
    if (stat(weights, &about) == 0) return DTRAIN_OK;
    snprintf(other, sizeof other, "%.4000s.index.json", weights);
    if (stat(other, &about) == 0) return DTRAIN_OK;
    if (!inside) return dtrain_fail(DTRAIN_ERROR_NOT_FOUND, "%s: No such file or directory", path);
    snprintf(other, sizeof other, "%.4000s/pytorch_model.bin", path);
    return dtrain_fail(DTRAIN_ERROR_FILE, "%s has no model.safetensors%s", path,
                       stat(other, &about) != 0
                           ? ", and none with an index"
                           : ", only torch's pytorch_model.bin: "
                             "model.save_pretrained(DIR, safe_serialization=True) converts it");
}

/* Tell whether transformers would take a file for the weights of its directory, and look for a config.json. */
static inline bool hf_is_model(const char *weights)
{
    const char *slash = strrchr(weights, '/');
    return strcmp(slash ? slash + 1 : weights, "model.safetensors") == 0;
}

/* Read config.json beside a file of weights, and check that it is JSON; c->text is NULL if there is none. hf_close
 * frees it. */
static inline dtrain_result hf_open(hf_config *c, const char *weights)
{
    const char *slash = strrchr(weights, '/');
    char name[HF_NAME];
    struct stat about;
    memset(c, 0, sizeof *c);
    snprintf(c->path, sizeof c->path, "%.*sconfig.json", slash ? (int)(slash - weights) + 1 : 0,
             weights);
    if (stat(c->path, &about) != 0 && errno == ENOENT) return DTRAIN_OK;
    dtrain_result result = read_file(c->path, &c->text, &c->bytes);
    if (result != DTRAIN_OK) return result;
    json_reader json = json_begin(c->path, c->text, c->bytes);
    (void)json_enter(&json, '{');
    while (json_member(&json, name, sizeof name)) (void)json_skip(&json);
    return json_end(&json);
}

static inline void hf_close(hf_config *c)
{
    free(c->text);
    memset(c, 0, sizeof *c);
}

/* Find the value of a key, "outer.inner" for one of an object inside: where it begins in the text, and its bytes. Of a
 * key that comes twice the last counts, as in Python. NULL: it is not there, or null. */
static inline const char *hf_find(const hf_config *c, const char *key, size_t *bytes)
{
    const char *dot = strchr(key, '.'), *found = NULL;
    char name[HF_NAME];
    hf_config inner = *c;
    json_reader json = json_begin(c->path, c->text, c->bytes);
    if (json_peek(&json) != '{' || !json_enter(&json, '{')) return NULL;
    while (json_member(&json, name, sizeof name)) {
        const bool null = json_peek(&json) == 'n';
        const char *begin = json.at;
        if (!json_skip(&json)) break;
        if (strncmp(name, key, dot ? (size_t)(dot - key) : sizeof name) != 0 ||
            (dot && strlen(name) != (size_t)(dot - key)))
            continue;
        found = null ? NULL : begin;
        *bytes = (size_t)(json.at - begin);
    }
    if (!dot || !found) return found;
    inner.text = (char *)(uintptr_t)found;
    inner.bytes = *bytes;
    return hf_find(&inner, dot + 1, bytes);
}

/* Write a value as text, of a string what it says. false: it is not there, or null. */
static inline bool hf_value(const hf_config *c, const char *key, char value[HF_VALUE])
{
    size_t bytes = 0;
    const char *found = c->text ? hf_find(c, key, &bytes) : NULL;
    if (!found) return false;
    if (*found == '"') found++, bytes -= 2;
    snprintf(value, HF_VALUE, "%.*s", bytes < HF_VALUE ? (int)bytes : HF_VALUE - 1, found);
    return true;
}

/* Return a number, NaN for what is none. */
static inline double hf_number(const hf_config *c, const char *key, double otherwise)
{
    char value[HF_VALUE], *end;
    if (!hf_value(c, key, value)) return otherwise;
    const double number = strtod(value, &end);
    return *value && !*end ? number : NAN;
}

/* Write a float with as many digits as bring it back. Return text. */
static inline const char *hf_float(float value, char text[32])
{
    snprintf(text, 32, "%g", (double)value);
    if ((float)strtod(text, NULL) != value) snprintf(text, 32, "%.9g", (double)value);
    return text;
}

/* Tell whether a key is there and true. */
static inline bool hf_true(const hf_config *c, const char *key)
{
    char value[HF_VALUE];
    return hf_value(c, key, value) && strcmp(value, "true") == 0;
}

/* Return a size, 0 for what is none. */
static inline long hf_size(const hf_config *c, const char *key, long otherwise)
{
    const double size = hf_number(c, key, (double)otherwise);
    return size >= 1 && size < 1e9 && size == floor(size) ? (long)size : 0;
}

/* Tell whether a value is one of those of a rule. */
static inline bool hf_one_of(const char *value, const char *values)
{
    for (size_t length;; values += length + 1) {
        length = strcspn(values, "|");
        if (strlen(value) == length && memcmp(values, value, length) == 0) return true;
        if (!values[length]) return false;
    }
}

/* Refuse what a model does not compute. rules: up to one without a key. */
static inline dtrain_result hf_check(const hf_config *c, const hf_rule *rules)
{
    char value[HF_VALUE];
    for (; rules->key; rules++)
        if (hf_value(c, rules->key, value) && !hf_one_of(value, rules->values))
            return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                               "%s: \"%s\" is %.80s, and this model computes nothing but %s",
                               c->path, rules->key, value, *rules->values ? rules->values : "null");
    return DTRAIN_OK;
}

/* Write a config.json beside a file of weights: an imported one, with the type of the values that are written. */
static inline dtrain_result hf_write(const hf_config *imported, const char *weights,
                                     const char *type)
{
    static const char *const keys[] = {"torch_dtype", "dtype"};
    const char *slash = strrchr(weights, '/'), *at = imported->text;
    char path[4096];
    snprintf(path, sizeof path, "%.*sconfig.json", slash ? (int)(slash - weights) + 1 : 0, weights);
    FILE *file = fopen(path, "w");
    for (int i = 0; file && i < 2; i++) {
        size_t bytes = 0;
        const char *found = hf_find(imported, keys[i], &bytes);
        if (!found || found < at) continue;
        fprintf(file, "%.*s\"%s\"", (int)(found - at), at, type);
        at = found + bytes;
    }
    if (file) fputs(at, file);
    const bool written = file && !ferror(file);
    if (file && fclose(file) == 0 && written) return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_FILE, "%s cannot be written: %s", path, strerror(errno));
}

#endif /* HUGGING_FACE_H */
