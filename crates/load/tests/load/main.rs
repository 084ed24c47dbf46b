//! Loading of files.

mod bad_files;
mod common;
mod loads;
