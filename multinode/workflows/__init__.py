"""One plain function a verb: composes the layers below; prints nothing."""
