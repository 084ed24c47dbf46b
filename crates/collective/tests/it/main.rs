//! Tests of collective operations.

mod operations;
mod random;
mod support;
mod trouble;
