// error: E0624
use memferry_engine::{Completion, ExecutionError};

fn ends(completion: &Completion) {
    completion.fail_unstarted(ExecutionError::Forked);
}

fn main() {}
