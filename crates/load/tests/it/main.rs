//! Tests of loading files.

mod bad_files;
mod common;
mod loads;
