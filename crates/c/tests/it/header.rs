//! The committed header equals the one generated from the source. To generate it again after a
//! change: `MEMFERRY_BLESS=1 cargo test -p memferry-c --test it header::`.

use std::fs;
use std::path::Path;

fn folder() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn generate() -> String {
    let config = cbindgen::Config::from_file(folder().join("cbindgen.toml"))
        .unwrap_or_else(|error| panic!("cbindgen.toml: {error}"));
    let bindings = cbindgen::Builder::new()
        .with_src(folder().join("src/code.rs"))
        .with_src(folder().join("src/lib.rs"))
        .with_config(config)
        .generate()
        .unwrap_or_else(|error| panic!("cbindgen: {error}"));
    let mut text = Vec::new();
    bindings.write(&mut text);
    String::from_utf8(text).expect("a header is text")
}

#[test]
fn the_header_is_what_the_source_says() {
    let (path, wanted) = (folder().join("include/adma.h"), generate());
    if std::env::var_os("MEMFERRY_BLESS").is_some_and(|bless| bless == "1") {
        fs::write(&path, &wanted).expect("the header can be written");
    }
    let found = fs::read_to_string(&path).unwrap_or_default();
    assert!(
        found == wanted,
        "include/adma.h is not what the source says: \
         run MEMFERRY_BLESS=1 cargo test -p memferry-c --test it header::"
    );
}

#[test]
fn the_readme_names_every_call_and_every_code() {
    let readme = fs::read_to_string(folder().join("README.md")).expect("there is a README");
    let header = generate();
    let codes = header.lines().filter_map(|line| line.strip_prefix("#define ADMA_E"));
    let codes = codes.map(|rest| format!("`ADMA_E{}`", rest.split(' ').next().unwrap_or(rest)));
    let calls = header.lines().filter(|line| !line.starts_with([' ', '/', '#']));
    let calls = calls.filter_map(|line| Some(line.split_once("adma_")?.1.split_once('(')?.0));
    let names: Vec<_> = codes.chain(calls.map(|name| format!("`adma_{name}"))).collect();
    assert!(names.len() > 30, "only {names:?} were found in the header");
    for name in names {
        assert!(readme.contains(&name), "README.md does not name {name}`");
    }
}
