//! The structures and constants of `abi` are those of libfabric's headers: a C program that includes the
//! headers prints theirs.
//!
//! The headers are the installed ones, or those of the folder `MEMFERRY_FABRIC_HEADERS` (the one that
//! contains `rdma`). Without headers, nothing is checked.

// A test without headers prints that it checks nothing.
#![allow(clippy::print_stderr)]

use std::collections::HashMap;
use std::fmt::Write;
use std::path::PathBuf;
use std::process::Command;

use memferry_fi::abi::{self, Layout};

fn folder() -> PathBuf {
    std::env::var_os("MEMFERRY_FABRIC_HEADERS").map_or_else(|| "/usr/include".into(), PathBuf::from)
}

/// The sizes, offsets and constants that the C program prints.
fn probe() -> Option<HashMap<String, u64>> {
    let headers = folder();
    if !headers.join("rdma/fabric.h").exists() {
        let why = format!("no headers in {}: apt install libfabric-dev", headers.display());
        memferry_testing::skip(memferry_testing::Requirement::Libfabric, why);
        return None;
    }
    let temporary = tempfile::tempdir().expect("a temporary folder");
    let (source, program) = (temporary.path().join("probe.c"), temporary.path().join("probe"));
    std::fs::write(&source, source_text()).expect("the program can be written");
    let compiled = Command::new("cc")
        .args(["-w", "-I"])
        .args([&headers, &source])
        .arg("-o")
        .arg(&program)
        .output()
        .expect("there is a C compiler");
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    let ran = Command::new(&program).output().expect("the program runs");
    assert!(ran.status.success());
    let text = String::from_utf8(ran.stdout).expect("text");
    let pair = |line: &str| {
        let (name, value) = line.split_once('=').expect("a name and a number");
        (name.to_owned(), value.parse().expect("a number"))
    };
    Some(text.lines().map(pair).collect())
}

fn source_text() -> String {
    let mut text = String::from("#include <stdio.h>\n#include <stddef.h>\n");
    let headers = ["fabric", "fi_domain", "fi_endpoint", "fi_eq", "fi_cm", "fi_tagged", "fi_rma"];
    for header in headers.into_iter().chain(["fi_atomic", "fi_collective", "providers/fi_prov"]) {
        writeln!(text, "#include <rdma/{header}.h>").unwrap();
    }
    text.push_str(
        "#define SAY(name, value) printf(\"%s=%llu\\n\", name, (unsigned long long)(value))\n",
    );
    text.push_str("int main(void) {\nSAY(\"major\", FI_MAJOR_VERSION);\n");
    for (name, _) in abi::numbers() {
        writeln!(text, "SAY(\"{name}\", (long long)({name}));").unwrap();
    }
    for Layout { name, fields, .. } in abi::layouts() {
        writeln!(text, "SAY(\"{name}\", sizeof({name}));").unwrap();
        for (field, ..) in *fields {
            let field = field.trim_start_matches("r#");
            writeln!(text, "SAY(\"{name}.{field} at\", offsetof({name}, {field}));").unwrap();
            writeln!(text, "SAY(\"{name}.{field}\", sizeof((({name} *)0)->{field}));").unwrap();
        }
    }
    text.push_str("return 0;\n}\n");
    text
}

#[test]
fn structures_lie_as_in_the_headers() {
    let Some(theirs) = probe() else { return };
    for Layout { name, size, fields } in abi::layouts() {
        let their_size = theirs[*name];
        // Later versions add fields at the end.
        let fits =
            *size as u64 == their_size || (theirs["major"] > 1 && (*size as u64) < their_size);
        assert!(fits, "{name} has {size} bytes, in C {their_size}");
        for (field, offset, size) in *fields {
            let field = format!("{name}.{}", field.trim_start_matches("r#"));
            assert_eq!(*offset as u64, theirs[&format!("{field} at")], "where {field} begins");
            assert_eq!(*size as u64, theirs[&field], "the size of {field}");
        }
    }
}

#[test]
fn numbers_are_those_of_the_headers() {
    let Some(theirs) = probe() else { return };
    for (name, ours) in abi::numbers() {
        assert_eq!(Some(ours), theirs.get(*name), "{name}");
    }
}
