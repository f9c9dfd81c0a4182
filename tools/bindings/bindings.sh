#!/bin/sh
# bindings.sh f90|py <dtrain.h: prints the module of a language, with what the public half of dtrain.h declares.
case $1 in f90) language=fortran ;; py) language=python ;; *) sed -n 2p "$0" >&2; exit 1 ;; esac
folder=$(dirname "$0")
exec awk -f "$folder/header.awk" -f "$folder/$language.awk"
