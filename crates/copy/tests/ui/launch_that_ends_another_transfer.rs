// error: E0133
use memferry_engine::Completion;
use memferry_engine::completion::Dispatch;

fn ends(completion: &Completion) {
    Dispatch::now(completion, []);
}

fn main() {}
