// error: E0624
use memferry_engine::{Completion, ExecutionError};

fn ends(completion: &Completion) {
    completion.refuse(ExecutionError::Forked);
}

fn main() {}
